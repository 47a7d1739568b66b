"""What things are called: values, roles, configuration, errors."""
