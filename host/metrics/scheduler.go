package metrics

import (
	"strconv"

	"github.com/mlxcel/mlxcel/host/batch"
	"github.com/prometheus/client_golang/prometheus"
)

// schedulerCollector reads a scheduler when Prometheus asks.
type schedulerCollector struct {
	status func() (batch.Status, bool)
}

func describe(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("mlxcel_"+name, help, labels, nil)
}

// What is told of a scheduler.
var (
	descState       = describe("state", "1 for the state that the scheduler is in.", "state")
	descActive      = describe("active_requests", "Requests that have joined.")
	descMaxActive   = describe("max_active_requests", "Requests that may join at a time.")
	descQueue       = describe("queued_requests", "Requests that wait.")
	descInFlight    = describe("steps_in_flight", "Steps under way.")
	descLastStep    = describe("last_step_seconds", "Duration of the latest step.")
	descKVUsed      = describe("kv_reserved_bytes", "KV cache that sequences have reserved.", "stage")
	descKVBudget    = describe("kv_budget_bytes", "KV cache that sequences may reserve; 0 means no limit.", "stage")
	descSteps       = describe("steps_total", "Steps that have ended.")
	descPrefilled   = describe("prefilled_tokens_total", "Prompt tokens run through the model, again after a preemption or a restart included.")
	descGenerated   = describe("generated_tokens_total", "Tokens generated.")
	descRequests    = describe("requests_total", "Sequences accepted, by how they ended.", "outcome")
	descQueueFull   = describe("queue_full_total", "Requests refused because too many waited.")
	descPreemptions = describe("preemptions_total", "Sequences that lost their place for lack of KV memory.")
	descRestarts    = describe("restarts_total", "Sequences that began again as their state was lost with a failed one that shared their step.")
	descUnshared    = describe("unshared_choices_total", "Choices that prefilled a prompt again that another had been to prefill for them.")
	descRelaunches  = describe("relaunches_total", "Times that the pipeline was started again.")
	descPanics      = describe("scheduler_panics_total", "Faults of the scheduler.")
	descRejections  = describe("pp_admission_rejections_total", "Sequences that could not join at once, by stage and reason.", "stage", "reason")
)

// Describe is prometheus.Collector's.
func (c schedulerCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		descState, descActive, descMaxActive, descQueue, descInFlight, descLastStep, descKVUsed, descKVBudget, descSteps, descPrefilled,
		descGenerated, descRequests, descQueueFull, descPreemptions, descRestarts, descUnshared, descRelaunches, descPanics,
		descRejections,
	} {
		out <- d
	}
}

// Collect is prometheus.Collector's.
func (c schedulerCollector) Collect(out chan<- prometheus.Metric) {
	s, ok := c.status()
	if !ok {
		return
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v uint64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
	}
	gauge(descState, 1, string(s.State))
	gauge(descActive, float64(len(s.Active)))
	gauge(descMaxActive, float64(s.MaxActive))
	gauge(descQueue, float64(s.QueueDepth))
	gauge(descInFlight, float64(s.InFlight))
	gauge(descLastStep, s.LastStep.Seconds())
	for i, kv := range s.KV {
		gauge(descKVUsed, float64(kv.Used), strconv.Itoa(i))
		gauge(descKVBudget, float64(kv.Budget), strconv.Itoa(i))
	}
	n := s.Counters
	counter(descSteps, n.Steps)
	counter(descPrefilled, n.PromptTokens)
	counter(descGenerated, n.GeneratedTokens)
	counter(descRequests, n.Finished, "finished")
	counter(descRequests, n.Failed, "failed")
	counter(descRequests, n.Cancelled, "cancelled")
	counter(descQueueFull, n.QueueFull)
	counter(descPreemptions, n.Preemptions)
	counter(descRestarts, n.Restarts)
	counter(descUnshared, n.Unshared)
	counter(descRelaunches, n.Relaunches)
	counter(descPanics, n.Panics)
	for why, times := range n.Rejections {
		counter(descRejections, times, strconv.Itoa(why.Stage), string(why.Reason))
	}
}
