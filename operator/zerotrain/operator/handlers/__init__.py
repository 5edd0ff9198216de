"""From events to passes: the process, the work queue, the controller, and the tasks around them."""
