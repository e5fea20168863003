"""Problems as data: shapes and gates by name, packets of speculation, and their tensors on a device."""
