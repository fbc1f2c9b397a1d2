"""Records of finished stages: `dvc.lock`, the cache, the run cache and the remote. The only package that uses DVC."""
