// Command scheduler schedules pods with the unmodified plugins of kube-scheduler, in its default profile or the profile of
// the case.
//
// Each line of the standard input is a case: the objects of a cluster, and pods without a node. Each line of the output
// has the decisions on these pods, in order. A pod is put on the best node, the first one by name, before the next pod.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"sort"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/sets"
	feature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler"
	"k8s.io/kubernetes/pkg/scheduler/apis/config"
	configscheme "k8s.io/kubernetes/pkg/scheduler/apis/config/scheme"
	"k8s.io/kubernetes/pkg/scheduler/backend/cache"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/defaultpreemption"
	plfeature "k8s.io/kubernetes/pkg/scheduler/framework/plugins/feature"
	"k8s.io/kubernetes/pkg/scheduler/profile"
)

// clusterCase is one line of the input.
type clusterCase struct {
	Nodes   []*v1.Node        `json:"nodes"`
	Pods    []*v1.Pod         `json:"pods"`
	Pending []*v1.Pod         `json:"pending"`
	Others  []json.RawMessage `json:"others"`
	// Config is a KubeSchedulerConfiguration with one profile.
	Config json.RawMessage `json:"config"`
}

// gated is the message of a pod that does not enter the scheduling queue.
const gated = "gated"

// firstStart is when the first pending pod starts, in seconds since 1970. The pods of the cluster start earlier.
const firstStart = 1800000000

// decision is the outcome for one pod.
type decision struct {
	Pod string `json:"pod"`
	// Scores of the nodes that can run the pod, by plugin, with the weights applied.
	Scores map[string]map[string]int64 `json:"scores,omitempty"`
	// Message of the event FailedScheduling, without the part about preemption if pods make room.
	Message string `json:"message,omitempty"`
	// Victims are the names of the pods that can make room, by node.
	Victims map[string][]string `json:"victims,omitempty"`
	// Nominated are nodes that the scheduler chose of these, in several attempts.
	Nominated []string `json:"nominated,omitempty"`
}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<28)
	out := json.NewEncoder(os.Stdout)
	for lines.Scan() {
		var one clusterCase
		if err := json.Unmarshal(lines.Bytes(), &one); err != nil {
			fail(err)
		}
		decisions, err := decide(&one)
		if err != nil {
			fail(err)
		}
		if err := out.Encode(decisions); err != nil {
			fail(err)
		}
	}
	if err := lines.Err(); err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "scheduler:", err)
	os.Exit(1)
}

// decide schedules the pods of a case one after the other.
func decide(one *clusterCase) ([]decision, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	objects, err := clusterObjects(one)
	if err != nil {
		return nil, err
	}
	client := fake.NewClientset(objects...)
	factory := informers.NewSharedInformerFactory(client, 0)
	recorder := profile.RecorderFactory(func(string) events.EventRecorderLogger { return &events.FakeRecorder{} })
	options, err := schedulerOptions(one.Config)
	if err != nil {
		return nil, err
	}
	sched, err := scheduler.New(ctx, client, factory, nil, recorder, options...)
	if err != nil {
		return nil, err
	}
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	if err := sched.WaitForHandlersSync(ctx); err != nil {
		return nil, err
	}
	frame := sched.Profiles["default-scheduler"]
	preemption, err := defaultpreemption.New(ctx, &config.DefaultPreemptionArgs{MinCandidateNodesPercentage: 100, MinCandidateNodesAbsolute: 1000},
		frame, plfeature.NewSchedulerFeaturesFromGates(feature.DefaultFeatureGate))
	if err != nil {
		return nil, err
	}
	snapshot, ok := frame.SnapshotSharedLister().(*cache.Snapshot)
	if !ok {
		return nil, fmt.Errorf("the snapshot of the scheduler has another type")
	}
	if err := nominate(ctx, sched, frame, one.Pending); err != nil {
		return nil, err
	}
	placed := append([]*v1.Pod(nil), one.Pods...)
	var decisions []decision
	for index, pod := range one.Pending {
		*snapshot = *cache.NewSnapshot(placed, one.Nodes)
		state := framework.NewCycleState()
		made := schedule(ctx, frame, preemption, snapshot, state, pod)
		if node := best(made.Scores); node != "" {
			sched.SchedulingQueue.DeleteNominatedPodIfExists(pod)
			// The devices of a pod are not free for the next pods.
			if len(pod.Spec.ResourceClaims) > 0 {
				if status := frame.RunReservePluginsReserve(ctx, state, pod, node); !status.IsSuccess() {
					made.Message = status.Message()
					decisions = append(decisions, made)
					continue
				}
			}
			bound := pod.DeepCopy()
			bound.Spec.NodeName = node
			// Without start times the order of victims with the same priority is not defined.
			start := metav1.Unix(firstStart+int64(index), 0)
			bound.Status.StartTime = &start
			placed = append(placed, bound)
		}
		decisions = append(decisions, made)
	}
	return decisions, nil
}

// nominate adds the nominations of the pods that enter the scheduling queue. The queue adds a nomination only if the pod
// enters it when the queue first sees the pod. Pods with claims enter it only if the scheduler has already read these
// claims, so without this function the nominations of such pods would depend on the order of the informers' events.
func nominate(ctx context.Context, sched *scheduler.Scheduler, frame framework.Framework, pending []*v1.Pod) error {
	for _, pod := range pending {
		if pod.Status.NominatedNodeName == "" || isGated(ctx, frame, pod) {
			continue
		}
		info, err := framework.NewPodInfo(pod)
		if err != nil {
			return err
		}
		sched.SchedulingQueue.AddNominatedPod(klog.FromContext(ctx), info, nil)
	}
	return nil
}

// isGated is whether the pod does not enter the scheduling queue.
func isGated(ctx context.Context, frame framework.Framework, pod *v1.Pod) bool {
	for _, plugin := range frame.PreEnqueuePlugins() {
		if !plugin.PreEnqueue(ctx, pod).IsSuccess() {
			return true
		}
	}
	return false
}

// schedulerOptions are the options for a configuration. Without a configuration, the scheduler has its default profile.
func schedulerOptions(raw json.RawMessage) ([]scheduler.Option, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	decoded, _, err := configscheme.Codecs.UniversalDecoder().Decode(raw, nil, nil)
	if err != nil {
		return nil, err
	}
	read, ok := decoded.(*config.KubeSchedulerConfiguration)
	if !ok {
		return nil, fmt.Errorf("the configuration has the type %T", decoded)
	}
	return []scheduler.Option{scheduler.WithProfiles(read.Profiles...)}, nil
}

// clusterObjects are the objects that the scheduler reads by informers.
func clusterObjects(one *clusterCase) ([]runtime.Object, error) {
	var objects []runtime.Object
	for _, node := range one.Nodes {
		objects = append(objects, node)
	}
	for _, pod := range append(append([]*v1.Pod(nil), one.Pods...), one.Pending...) {
		objects = append(objects, pod)
	}
	decoder := clientscheme.Codecs.UniversalDeserializer()
	for _, raw := range one.Others {
		object, _, err := decoder.Decode(raw, nil, nil)
		if err != nil {
			return nil, err
		}
		objects = append(objects, object)
	}
	return objects, nil
}

// schedule decides on one pod, as the method schedulePod of the scheduler does, but on all nodes.
func schedule(ctx context.Context, frame framework.Framework, preemption *defaultpreemption.DefaultPreemption, snapshot *cache.Snapshot, state fwk.CycleState, pod *v1.Pod) decision {
	made := decision{Pod: pod.Name}
	if isGated(ctx, frame, pod) {
		made.Message = gated
		return made
	}
	nodes, _ := snapshot.NodeInfos().List()
	if len(nodes) == 0 {
		made.Message = scheduler.ErrNoNodesAvailable.Error()
		return made
	}
	diagnosis := framework.Diagnosis{NodeToStatus: framework.NewDefaultNodeToStatus()}
	result, status, plugins := frame.RunPreFilterPlugins(ctx, state, pod)
	var fitting []fwk.NodeInfo
	switch {
	case !status.IsSuccess() && !status.IsRejected():
		made.Message = "error: " + status.Message()
		return made
	case !status.IsSuccess():
		diagnosis.NodeToStatus.SetAbsentNodesStatus(status)
		diagnosis.PreFilterMsg = status.Message()
	default:
		if !result.AllNodes() {
			text := fmt.Sprintf("node(s) didn't satisfy plugin(s) %v", sets.List(plugins))
			diagnosis.NodeToStatus.SetAbsentNodesStatus(fwk.NewStatus(fwk.UnschedulableAndUnresolvable, text))
		}
		// As the method evaluateNominatedNode of the scheduler does.
		if nominated, err := snapshot.NodeInfos().Get(pod.Status.NominatedNodeName); err == nil && nominated.Node() != nil {
			status := frame.RunFilterPluginsWithNominatedPods(ctx, state, pod, nominated)
			if status.IsSuccess() {
				fitting = append(fitting, nominated)
				break
			}
			diagnosis.NodeToStatus.Set(nominated.Node().Name, status)
		}
		failed := ""
		for _, node := range nodes {
			if !result.AllNodes() && !result.NodeNames.Has(node.Node().Name) {
				continue
			}
			status := frame.RunFilterPluginsWithNominatedPods(ctx, state, pod, node)
			switch {
			case status.IsSuccess():
				fitting = append(fitting, node)
			case status.Code() == fwk.Error && (failed == "" || node.Node().Name < failed):
				failed, made.Message = node.Node().Name, status.Message()
			default:
				diagnosis.NodeToStatus.Set(node.Node().Name, status)
			}
		}
		// As in the method findNodesThatPassFilters of the scheduler, an error ends the attempt. The scheduler reports the
		// first error, here the error of the first node by name.
		if failed != "" {
			return made
		}
	}
	if len(fitting) == 0 {
		fit := &framework.FitError{Pod: pod, NumAllNodes: len(nodes), Diagnosis: diagnosis}
		if !makeRoom(ctx, preemption, snapshot, state, pod, diagnosis.NodeToStatus, &made) {
			_, status := frame.RunPostFilterPlugins(ctx, state, pod, diagnosis.NodeToStatus)
			fit.Diagnosis.PostFilterMsg = status.Message()
		}
		made.Message = fit.Error()
		return made
	}
	if status := frame.RunPreScorePlugins(ctx, state, pod, fitting); !status.IsSuccess() {
		made.Message = "error: " + status.Message()
		return made
	}
	scored, status := frame.RunScorePlugins(ctx, state, pod, fitting)
	if !status.IsSuccess() {
		made.Message = "error: " + status.Message()
		return made
	}
	made.Scores = map[string]map[string]int64{}
	for _, node := range scored {
		of := map[string]int64{}
		for _, plugin := range node.Scores {
			of[plugin.Name] = plugin.Score
		}
		made.Scores[node.Name] = of
	}
	return made
}

// makeRoom finds the nodes on which preemption helps.
func makeRoom(ctx context.Context, preemption *defaultpreemption.DefaultPreemption, snapshot *cache.Snapshot, state fwk.CycleState,
	pod *v1.Pod, statuses *framework.NodeToStatus, made *decision) bool {
	if can, _ := preemption.PodEligibleToPreemptOthers(ctx, pod, statuses.Get(pod.Status.NominatedNodeName)); !can {
		return false
	}
	potential, err := statuses.NodesForStatusCode(snapshot.NodeInfos(), fwk.Unschedulable)
	if err != nil || len(potential) == 0 {
		return false
	}
	budgets, err := preemption.Evaluator.PdbLister.List(labels.Everything())
	if err != nil {
		return false
	}
	candidates, _, _ := preemption.Evaluator.DryRunPreemption(ctx, state, pod, potential, budgets, 0, int32(len(potential)+1))
	if len(candidates) == 0 {
		return false
	}
	made.Victims = map[string][]string{}
	for _, candidate := range candidates {
		var names []string
		for _, victim := range candidate.Victims().Pods {
			names = append(names, victim.Name)
		}
		sort.Strings(names)
		made.Victims[candidate.Name()] = names
	}
	chosen := sets.New[string]()
	for range 32 {
		chosen.Insert(preemption.Evaluator.SelectCandidate(ctx, candidates).Name())
	}
	made.Nominated = sets.List(chosen)
	return true
}

// best is the first node by name with the highest sum of scores.
func best(scores map[string]map[string]int64) string {
	var names []string
	for name := range scores {
		names = append(names, name)
	}
	sort.Strings(names)
	found, most := "", int64(-1)
	for _, name := range names {
		var sum int64
		for _, score := range scores[name] {
			sum += score
		}
		if sum > most {
			found, most = name, sum
		}
	}
	return found
}
