"""Models beside the policy: the teacher of a distillation and the critic; importing them does not import torch."""
