"""How much time and host memory a job needs: from its configuration before the first step, from its phases after. Pure; runs in
the coordinator (job_needs.py in the trainer too) and imports scheduling/model.py alone."""
