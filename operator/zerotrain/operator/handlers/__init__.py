"""From events to passes: kopf's watch, the work queue, the controller, and the tasks around them."""
