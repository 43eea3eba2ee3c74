module github.com/mlxcel/mlxcel/mlxshared

go 1.27

require github.com/mlxcel/mlxcel/sdk v0.0.0

require golang.org/x/sys v0.50.0 // indirect

replace github.com/mlxcel/mlxcel/sdk => ../sdk
