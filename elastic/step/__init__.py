"""What happens between two committed steps."""
