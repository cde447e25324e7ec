"""What must be known of a target model: where it is, its shape, its layers, its norm and head."""
