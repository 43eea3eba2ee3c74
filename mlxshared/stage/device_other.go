//go:build !darwin

package stage

const onApple = false
