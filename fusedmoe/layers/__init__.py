"""The classes and functions that users build models with: `MoE`, `Sequential`, LoRA, loading, losses."""
