"""A reward that reads the token ids of one completion."""


def score(completion_ids):
    return float(len(completion_ids))
