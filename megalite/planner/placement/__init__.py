"""The order of hosts for a layout, by the traffic between them."""
