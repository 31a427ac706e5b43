from retrain.registry import transform


@transform("uncorrected", correction=True)
def uncorrected(advantages):
    """In place of `tis`: stale samples count as if the policy that is trained had drawn them."""
    return advantages
