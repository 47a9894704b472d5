"""The paper's figures and claims, measured again."""
