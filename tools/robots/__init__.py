"""The robots of ``config/robots`` without hardware: URDFs, simple drivers, and a check of the path of the arms."""
