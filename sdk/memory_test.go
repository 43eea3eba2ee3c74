package sdk

import "testing"

func TestMemory(t *testing.T) {
	total, free := SystemMemory()
	if resident := ResidentBytes(); resident <= 0 || resident > total || free <= 0 || free > total {
		t.Errorf("%d bytes of RAM, %d free, %d of them this process's", total, free, resident)
	}
}
