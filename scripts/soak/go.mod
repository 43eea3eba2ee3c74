module github.com/mlxcel/mlxcel/scripts/soak

go 1.27.0
