"""Loading: finds the boxes that a rank needs, reads them into its tensors and checks them."""
