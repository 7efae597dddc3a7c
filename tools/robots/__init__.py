"""The robots of ``config/robots`` without hardware: descriptions, small drivers, a check of the path they take."""
