"""From a response to a scalar: format rules, grading in killable workers, terminal reward."""
