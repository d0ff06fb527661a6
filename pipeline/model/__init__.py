"""open_clip's towers, their architectures, and batch norm in fp32."""
