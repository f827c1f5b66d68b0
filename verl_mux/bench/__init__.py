"""What is behind `verl-mux bench`: each module measures one part, in the process of that command and those it starts. May import
any room but `trainer` and `cli`; nothing imports it.
"""
