"""Send the metrics of a run to trackers such as Weights & Biases, from a process of its own per tracker."""
