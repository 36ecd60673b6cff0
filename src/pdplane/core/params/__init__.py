"""vLLM's hand-off: prefill holds pages under a lease, decode reads them and has the reading confirmed."""
