"""Work of a priority below the jobs, which takes nodes that no job uses or waits for, and leaves when one does. Pure, in the
coordinator.
"""
