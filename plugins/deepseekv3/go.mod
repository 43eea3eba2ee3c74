module github.com/mlxcel/mlxcel/plugins/deepseekv3

go 1.27

require (
	github.com/mlxcel/mlxcel/mlxshared v0.0.0
	github.com/mlxcel/mlxcel/sdk v0.0.0
)

replace github.com/mlxcel/mlxcel/sdk => ../../sdk

replace github.com/mlxcel/mlxcel/mlxshared => ../../mlxshared
