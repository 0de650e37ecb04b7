"""Mixture of experts: routing, the exchange of tokens between ranks, and the balance of experts."""
