"""What happens between two committed steps: fixed shares of the state, one agreement per step, and
how the workers that are left go on from the newest one."""
