"""Authentication, tenants, and the limits of API keys."""
