package engine

// Device is the kind of device that the stages on this machine compute on: "cpu", "metal" or "cuda"; empty where other machines
// hold the model.
func (e *Engine) Device() string {
	if e.catalog == nil {
		return ""
	}
	choice, err := e.catalog.ForModelType(e.Model.ModelType)
	if err != nil {
		return "" // Open has told
	}
	return choice.Entry.Device.Kind
}
