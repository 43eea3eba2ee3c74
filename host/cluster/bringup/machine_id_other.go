//go:build !linux && !darwin

package bringup

// MachineID names the running system, whose memory all its processes share. It is empty where the system does not tell.
func MachineID() string { return "" }
