"""Predictors of response lengths. Run in the trainer; called by rollout/control. Pure."""
