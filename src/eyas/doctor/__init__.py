"""What is wrong when few drafted tokens are accepted: a chain of checks that names the broken link."""
