"""Small differentiable programs by theme, shared by every test that needs one."""
