"""SGLang's hand-off: one room for each request, pages granted by decode and sent by prefill."""
