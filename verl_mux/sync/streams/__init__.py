"""How pieces of a model travel: connections, their frames and codes, the threads that send and receive. In trainer workers and
rollout workers; knows the layout of a model, and nothing of plans.
"""
