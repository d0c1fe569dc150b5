"""What every Espalier process needs around its work: settings, lifecycle, the bus, presence, logs."""
