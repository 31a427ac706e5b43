"""The policy and what it is trained with. Importing this registers the components, without torch."""

from retrain.training import prm as prm
from retrain.training import reference as reference
