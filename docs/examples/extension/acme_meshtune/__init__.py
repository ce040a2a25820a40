"""Everything that Acme adds to Meshtune."""
