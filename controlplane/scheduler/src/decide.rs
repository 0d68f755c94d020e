//! Selects the node for a pod, or reports the reason why no node fits.

mod evaluations;
mod search;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use tokio::time::Instant;

use self::evaluations::Computed;
use self::search::{RefusedNodes, Search, refuse_unnamed, wanted_nodes};
use crate::config::Profile;
use crate::devices::{self, DEVICES, PodDevices};
use crate::extender::result::ExtenderResult;
use crate::filter::{self, declared_features, node_affinity};
use crate::hint::Changes;
use crate::memo::{NodeInput, NodeOutcome};
use crate::metrics::{AttemptResult, Evaluation, ExtensionPoint};
use crate::node_score::NodeScores;
use crate::object::Pod;
use crate::refusal::Refused;
use crate::request::PodRequirements;
use crate::score;
use crate::snapshot::{Candidate, Snapshot};
use crate::topology::Topology;
use crate::volumes::PodClaims;

/// The reason why no node can run a pod.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unschedulable {
    pub(crate) message: String,
    /// The changes that may help.
    pub(crate) helped_by: Changes,
    /// The plugins that refused the pod, by upstream's names.
    pub(crate) plugins: BTreeSet<&'static str>,
    /// Nodes on which preemption may help.
    pub(crate) resolvable: BTreeSet<String>,
    pub(crate) found_by: FoundBy,
}

/// The step that ended the search for a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FoundBy {
    /// A pre-filter, before any node was checked.
    PreFilter,
    /// The filters refused all nodes.
    Filters,
    /// A filter failed.
    Error,
}

/// The input of the filters for a pod. It is computed once for all nodes.
#[derive(Debug, Default)]
pub(crate) struct Prepared {
    pub(crate) topology: Topology,
    needs: PodRequirements,
    claims: PodClaims,
    devices: PodDevices,
}

/// The outcome of the filters.
pub(crate) struct Filtered<'a> {
    pub(crate) prepared: Prepared,
    /// The nodes that can run the pod.
    pub(crate) fitting: Vec<Candidate<'a>>,
    /// The scores of these nodes that depend on no other node or pod.
    pub(crate) scores: Vec<NodeScores>,
    refused: RefusedNodes<'a>,
    computed: Computed,
}

// === impl Prepared ===

impl Prepared {
    /// Whether a filter or score reads more than the node itself: other nodes, their pods, claims or devices.
    fn reads_others(&self) -> bool {
        let Self { topology, needs, claims, devices } = self;
        needs.restarts_all || !(topology.accepts_all() && claims.is_empty() && devices.is_empty())
    }
}

/// The name of the best node. The error has upstream's message, which counts the nodes by reason.
pub(crate) fn decide(pod: &Pod, profile: &Profile, snapshot: &mut Snapshot) -> Result<String, Unschedulable> {
    decide_measured(pod, profile, snapshot, |_point, _result, _start, _evaluations| {})
}

/// Does the same as [`decide`]. Calls `ran` after each extension point, with its result, its start and the evaluations
/// of its plugins.
pub(crate) fn decide_measured(
    pod: &Pod,
    profile: &Profile,
    snapshot: &mut Snapshot,
    ran: impl Fn(ExtensionPoint, AttemptResult, Instant, &[Evaluation]),
) -> Result<String, Unschedulable> {
    let start = Instant::now();
    let input = pre_filter(pod, profile, snapshot);
    if snapshot.node_count() > 0 {
        let (result, evaluations) = match &input {
            Ok(input) => (AttemptResult::Scheduled, evaluations::pre_filters(pod, profile, &input.prepared)),
            Err(refused) => {
                let plugins = refused.plugins.iter().map(|plugin| (*plugin, 1));
                (AttemptResult::Unschedulable, plugins.collect())
            }
        };
        ran(ExtensionPoint::PreFilter, result, start, &evaluations);
    }
    let (input, start) = (input?, Instant::now());
    let refused_by_nominated = refused_beside_nominated(pod, profile, snapshot);
    let snapshot = &*snapshot;
    let found = filter_nodes(pod, profile, input, snapshot, refused_by_nominated);
    // As upstream, the extension point also counts as successful if the filters refuse all nodes.
    let filters = found.as_ref().map(|found| found.computed.filters(pod, profile, &found.prepared));
    ran(ExtensionPoint::Filter, AttemptResult::of(&found), start, &filters.unwrap_or_default());
    let (found, start) = (found?, Instant::now());
    let best = score::best(pod, profile, found.score_inputs(snapshot));
    // A single node needs no score.
    if found.fitting.len() > 1 {
        let evaluations = found.computed.scores(profile, &found.prepared, &found.scores);
        ran(ExtensionPoint::Score, AttemptResult::Scheduled, start, &evaluations);
    }
    best.map(|place| found.fitting[place].properties.name.clone()).ok_or_else(|| found.unschedulable())
}

/// The nodes for a pod before extenders filter them.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Ranked {
    /// The nodes that can run the pod.
    pub(crate) nodes: Vec<RankedNode>,
    /// Whether the only node is the pod's nominated node, and no other node was checked.
    pub(crate) only_nominated: bool,
    refused: BTreeMap<String, Refused>,
}

/// A node that can run the pod.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RankedNode {
    pub(crate) name: String,
    /// The sum of the weighted scores.
    score: i64,
    /// Number of pods on the node.
    pods: i128,
}

/// The nodes for a pod with their scores. The error is the reason why no node can run the pod.
pub(crate) fn rank(pod: &Pod, profile: &Profile, snapshot: &mut Snapshot) -> Result<Ranked, Unschedulable> {
    let refused_by_nominated = refused_beside_nominated(pod, profile, snapshot);
    let snapshot = &*snapshot;
    let mut found = filter(pod, profile, snapshot, refused_by_nominated)?;
    if found.fitting.is_empty() {
        return Err(found.unschedulable());
    }
    // If the extenders refuse all fitting nodes, the message counts all nodes. So the nodes that the node affinity does
    // not name need a refusal, too.
    if let Some(named) = named(pod, profile) {
        refuse_unnamed(&named, snapshot, &mut found.refused);
    }
    let nominated = pod.status.nominated_node_name.as_deref();
    let only_nominated = found.fitting.iter().any(|node| Some(node.properties.name.as_str()) == nominated);
    let totals = score::totals(pod, profile, found.score_inputs(snapshot));
    let nodes = found.fitting.iter().zip(totals);
    let ranked = nodes.map(|(node, score)| {
        let name = node.properties.name.clone();
        RankedNode { name, score, pods: node.info.requested.pods }
    });
    let nodes = ranked.collect();
    let refused = found.refused.into_iter();
    let refused = refused.map(|(name, refused)| (name.to_owned(), Arc::unwrap_or_clone(refused))).collect();
    Ok(Ranked { nodes, only_nominated, refused })
}

/// The first of these nodes that can run the pod now.
pub(crate) fn first_fitting(
    pod: &Pod,
    profile: &Profile,
    snapshot: &mut Snapshot,
    nodes: Vec<String>,
) -> Option<String> {
    let refused_by_nominated = refused_beside_nominated(pod, profile, snapshot);
    let snapshot = &*snapshot;
    let prepared = prepare(pod, profile, snapshot).ok()?;
    let fits = |name: &String| {
        let node = snapshot.candidate(name).filter(|_| !refused_by_nominated.contains_key(name));
        node.is_some_and(|node| refuse(pod, profile, &prepared, node, snapshot).is_none())
    };
    nodes.into_iter().find(fits)
}

/// Filters the nodes. `refused_by_nominated` has nodes that are already refused. The error is the reason why no node
/// can run the pod.
pub(crate) fn filter<'a>(
    pod: &Pod,
    profile: &Profile,
    snapshot: &'a Snapshot,
    refused_by_nominated: HashMap<String, Refused>,
) -> Result<Filtered<'a>, Unschedulable> {
    let input = pre_filter(pod, profile, snapshot)?;
    filter_nodes(pod, profile, input, snapshot, refused_by_nominated)
}

/// The result of the pre-filters.
struct PreFiltered<'p> {
    /// The nodes that the pod's node affinity names. `None` if all nodes must be checked.
    named: Option<BTreeSet<&'p str>>,
    prepared: Prepared,
}

/// Runs the pre-filters. The error is the reason why no node can run the pod.
fn pre_filter<'p>(
    pod: &'p Pod,
    profile: &Profile,
    snapshot: &Snapshot,
) -> Result<PreFiltered<'p>, Unschedulable> {
    let total = snapshot.node_count();
    let none = |message: String, helped_by, plugin: Option<&'static str>| Unschedulable {
        message,
        helped_by,
        plugins: plugin.into_iter().collect(),
        resolvable: BTreeSet::new(),
        found_by: FoundBy::PreFilter,
    };
    if total == 0 {
        return Err(none("no nodes available to schedule pods".to_owned(), Changes::NODE, None));
    }
    let prefilter = |why: &str, plugin| {
        none(format!("0/{total} nodes are available: {why}."), Changes::ALL, Some(plugin))
    };
    let named = named(pod, profile);
    if named.as_ref().is_some_and(BTreeSet::is_empty) {
        return Err(prefilter("pod affinity terms conflict", "NodeAffinity"));
    }
    let prepared = prepare(pod, profile, snapshot).map_err(|why| {
        let is_volume = claims(pod, profile, snapshot).is_err();
        prefilter(&why, if is_volume { "VolumeBinding" } else { DEVICES })
    })?;
    Ok(PreFiltered { named, prepared })
}

/// The nodes that the pod's node affinity names. `None` if all nodes must be checked.
fn named<'p>(pod: &'p Pod, profile: &Profile) -> Option<BTreeSet<&'p str>> {
    node_affinity::named(pod).filter(|_| profile.filters_by("NodeAffinity"))
}

/// Filters the nodes after the pre-filters. Returns an error if a claim or class is faulty.
fn filter_nodes<'a>(
    pod: &Pod,
    profile: &Profile,
    input: PreFiltered<'_>,
    snapshot: &'a Snapshot,
    refused_by_nominated: HashMap<String, Refused>,
) -> Result<Filtered<'a>, Unschedulable> {
    let PreFiltered { named, prepared } = input;
    let total = snapshot.node_count();
    let wanted = wanted_nodes(profile.percentage, total).min(total);
    let mut outcomes = snapshot.outcomes.borrow_mut();
    let needs = &prepared.needs;
    let is_equal = |known: &NodeInput| known.is_of(pod, profile, needs);
    let mut search = Search {
        pod,
        profile,
        snapshot,
        prepared: &prepared,
        reads_others: prepared.reads_others(),
        outcomes: outcomes.table(is_equal, || NodeInput::of(pod, profile, needs)),
        refused_by_nominated,
        checked: None,
        fitting: Vec::with_capacity(wanted),
        scores: Vec::with_capacity(wanted),
        refused: Vec::new(),
        computed: Computed::default(),
    };
    search.check_nominated();
    if search.fitting.is_empty() {
        match &named {
            Some(named) => search.check_named(named, wanted)?,
            None => search.check_all(wanted)?,
        }
    }
    let Search { fitting, scores, mut refused, computed, .. } = search;
    if let (Some(named), true) = (&named, fitting.is_empty()) {
        refuse_unnamed(named, snapshot, &mut refused);
    }
    Ok(Filtered { prepared, fitting, scores, refused, computed })
}

/// The part of the decision about a node that depends only on the pod and the node.
fn node_outcome(pod: &Pod, profile: &Profile, needs: &PodRequirements, node: Candidate<'_>) -> NodeOutcome {
    match filter::refuse(pod, needs, profile, node) {
        Some(refused) => Err(Arc::new(refused)),
        None => Ok(score::of_node(pod, profile, needs, node)),
    }
}

/// Computes the input of the filters. The error is the reason why no node can run the pod.
pub(crate) fn prepare(pod: &Pod, profile: &Profile, snapshot: &Snapshot) -> Result<Prepared, String> {
    let mut claims = claims(pod, profile, snapshot)?;
    if !claims.are_in_use(&snapshot.claim_users) {
        claims.skip_users();
    }
    let devices = snapshot.devices.of_pod(pod)?;
    let mut needs = PodRequirements::of(pod);
    needs.of_classes = devices.resources_of_classes();
    Ok(Prepared { topology: Topology::of(pod, profile, snapshot), needs, claims, devices })
}

fn claims(pod: &Pod, profile: &Profile, snapshot: &Snapshot) -> Result<PodClaims, String> {
    if profile.filters_by("VolumeBinding") { snapshot.volumes.of_pod(pod) } else { Ok(PodClaims::default()) }
}

/// The refusal of the first filter that refuses the pod, in upstream's order. `None` if the node can run the pod.
pub(crate) fn refuse(
    pod: &Pod,
    profile: &Profile,
    prepared: &Prepared,
    node: Candidate<'_>,
    snapshot: &Snapshot,
) -> Option<Refused> {
    filter::refuse(pod, &prepared.needs, profile, node).or_else(|| {
        let refused = refuse_by_others(profile, prepared, node, snapshot);
        refused.unwrap_or_else(|why| Some(devices::refused(&why)))
    })
}

/// The refusal of the first filter that refuses the pod, of the filters that [`filter::refuse`] does not run. They
/// depend on other nodes, pods of other nodes, claims or devices, or follow such a filter in upstream's order. The
/// error means that no node may run the pod.
fn refuse_by_others(
    profile: &Profile,
    prepared: &Prepared,
    node: Candidate<'_>,
    snapshot: &Snapshot,
) -> Result<Option<Refused>, String> {
    let claims = &prepared.claims;
    let refused = claims
        .refuse(profile, node.properties, snapshot.volume_usage(node))
        .or_else(|| prepared.topology.refuse(profile, node));
    if refused.is_some() {
        return Ok(refused);
    }
    let refused = snapshot.devices.refuse(&prepared.devices, node.properties)?;
    let needed = prepared.needs.restarts_all && profile.filters_by("NodeDeclaredFeatures");
    Ok(refused.or_else(|| declared_features::refuse(needed, node.properties)))
}

/// The result for a pod whose device claims cannot be evaluated. Source: `Filter` of upstream's plugin, which then
/// returns an error, not a refusal.
fn filter_failed(why: &str) -> Unschedulable {
    Unschedulable {
        message: format!("running \"DynamicResources\" filter plugin: {why}"),
        helped_by: Changes::ALL,
        plugins: BTreeSet::new(),
        resolvable: BTreeSet::new(),
        found_by: FoundBy::Error,
    }
}

/// The message for a pod whose volumes or devices could not be reserved on the chosen node. Source:
/// `RunReservePluginsReserve`.
pub(crate) fn reserve_failed(plugin: &str, why: &str) -> String {
    format!("running Reserve plugin \"{plugin}\": {why}")
}

/// The nodes that refuse the pod if their nominated pods count as running. Only nominated pods of the same or a higher
/// priority count.
pub(crate) fn refused_beside_nominated(
    pod: &Pod,
    profile: &Profile,
    snapshot: &mut Snapshot,
) -> HashMap<String, Refused> {
    let mut found = HashMap::new();
    let nodes = snapshot.nodes_nominated_beside(pod);
    if nodes.is_empty() {
        return found;
    }
    let claims = claims(pod, profile, snapshot);
    let skipped = Skipped {
        affinity: Topology::of(pod, profile, snapshot).skips_affinity(),
        users: claims.is_ok_and(|claims| !claims.are_in_use(&snapshot.claim_users)),
    };
    for node in nodes {
        if let Some(refused) = refuse_beside_nominated(pod, profile, snapshot, skipped, &node) {
            found.insert(node, refused);
        }
    }
    found
}

/// The checks that upstream skips. Upstream chooses these checks before it adds the nominated pods to the node.
#[derive(Clone, Copy)]
struct Skipped {
    /// The affinity filter.
    affinity: bool,
    /// The check for other users of claims that only one pod may use.
    users: bool,
}

/// The refusal of a node if the pods that are nominated for it run there.
fn refuse_beside_nominated(
    pod: &Pod,
    profile: &Profile,
    snapshot: &mut Snapshot,
    skipped: Skipped,
    node: &str,
) -> Option<Refused> {
    let added = snapshot.assume_nominated(pod, node);
    let refused = prepare(pod, profile, snapshot).ok().and_then(|mut prepared| {
        if skipped.affinity {
            prepared.topology.skip_affinity();
        }
        if skipped.users {
            prepared.claims.skip_users();
        }
        let candidate = snapshot.candidate(node)?;
        filter::refuse(pod, &prepared.needs, profile, candidate).or_else(|| {
            // An error does not depend on the nominated pods. The search of all nodes reports it.
            refuse_by_others(profile, &prepared, candidate, snapshot).unwrap_or_default()
        })
    });
    for uid in added {
        snapshot.remove(&uid);
    }
    refused
}

/// Upstream's message: the number of nodes by reason.
pub(crate) fn fit_error_message<'a>(total: usize, reasons: impl Iterator<Item = &'a str>) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for reason in reasons {
        *counts.entry(reason).or_default() += 1;
    }
    let mut counted: Vec<String> =
        counts.into_iter().map(|(reason, count)| format!("{count} {reason}")).collect();
    counted.sort();
    format!("0/{total} nodes are available: {}.", counted.join(", "))
}

// === impl Filtered ===

impl Filtered<'_> {
    /// The nodes that can run the pod, as input of the scores.
    pub(crate) fn score_inputs<'s>(&'s self, snapshot: &'s Snapshot) -> score::Inputs<'s> {
        let (nodes, own) = (self.fitting.as_slice(), self.scores.as_slice());
        score::Inputs { topology: &self.prepared.topology, snapshot, nodes, own }
    }

    /// The refusals by the filters, if no node can run the pod.
    pub(crate) fn unschedulable(&self) -> Unschedulable {
        let refused = self.refused.iter().map(|(name, refused)| (*name, refused.as_ref()));
        unschedulable(self.refused.len() + self.fitting.len(), refused)
    }
}

// === impl Ranked ===

impl Ranked {
    /// The accepted nodes, the best first. Of nodes with equal scores, the node with the fewest pods comes first.
    pub(crate) fn order(&self, advice: &ExtenderResult) -> Vec<String> {
        let scored = |node: &RankedNode| {
            let score = advice.scores.get(&node.name)?;
            Some((std::cmp::Reverse(node.score.saturating_add(*score)), node.pods, node.name.clone()))
        };
        let mut nodes: Vec<_> = self.nodes.iter().filter_map(scored).collect();
        nodes.sort();
        nodes.into_iter().map(|(_, _, name)| name).collect()
    }

    /// The refusals by filters and extenders, if the extenders accept no node.
    pub(crate) fn unschedulable(mut self, advice: ExtenderResult) -> Unschedulable {
        self.refused.extend(advice.refused);
        unschedulable(self.refused.len(), self.refused.iter().map(|(name, refused)| (name.as_str(), refused)))
    }
}

fn unschedulable<'a>(
    total: usize,
    refused: impl Iterator<Item = (&'a str, &'a Refused)> + Clone,
) -> Unschedulable {
    let reasons = refused.clone().flat_map(|(_, refused)| refused.reasons.iter().map(String::as_str));
    let resolvable = refused.clone().filter(|(_, refused)| refused.resolvable);
    Unschedulable {
        message: fit_error_message(total, reasons),
        plugins: refused.clone().map(|(_, refused)| refused.plugin).collect(),
        resolvable: resolvable.map(|(name, _)| name.to_owned()).collect(),
        // A new node may be able to run any pod.
        helped_by: refused.fold(Changes::NODE, |all, (_, refused)| all | refused.helped_by),
        found_by: FoundBy::Filters,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use serde_json::json;

    #[test]
    fn nodes_are_counted_by_reason() {
        let taints = json!([{"key": "k", "effect": "NoSchedule"}]);
        let mut snapshot = fixture::snapshot(&[
            fixture::node("a", json!({})),
            fixture::node("b", json!({})),
            fixture::node("c", json!({"/spec/taints": taints})),
        ]);
        let greedy = fixture::pod("p", json!({"containers": [{"resources": {"requests": {"cpu": "64"}}}]}));
        let message = "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 Insufficient cpu.";
        let refused = decide(&greedy, &Profile::default(), &mut snapshot).unwrap_err();
        assert_eq!(
            (refused.message.as_str(), refused.helped_by),
            (message, Changes::NODE | Changes::POD_GONE)
        );
        assert!(refused.resolvable.is_empty(), "no node has so much");
        assert_eq!(refused.plugins, ["NodeResourcesFit", "TaintToleration"].into());
        assert_eq!(
            decide(&fixture::pod("p", json!({})), &Profile::default(), &mut snapshot),
            Ok("a".to_owned())
        );
        let none = decide(&greedy, &Profile::default(), &mut fixture::snapshot(&[])).unwrap_err();
        assert_eq!(none.message, "no nodes available to schedule pods");
    }

    #[test]
    fn equal_pods_share_the_refusals_of_nodes() {
        let snapshot = fixture::snapshot(&[
            fixture::node("a", json!({"/spec/unschedulable": true})),
            fixture::node("b", json!({})),
        ]);
        let refused = |name: &str| {
            let found =
                filter(&fixture::pod(name, json!({})), &Profile::default(), &snapshot, HashMap::new());
            let found = found.unwrap_or_else(|error| panic!("{error:?}"));
            found.refused[0].1.clone()
        };
        assert!(Arc::ptr_eq(&refused("p"), &refused("q")));
    }

    #[test]
    fn a_pod_yields_to_nominated_pods_that_are_as_important() {
        let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({})), fixture::node("b", json!({}))]);
        let pod = |name: &str, priority: i32, cpu: &str| {
            let container = json!({"resources": {"requests": {"cpu": cpu}}});
            fixture::pod(name, json!({"priority": priority, "containers": [container]}))
        };
        snapshot.nominate(&pod("p", 10, "3"), "a");
        let mut fitting = |pod: &Pod| -> String {
            let refused_by_nominated = refused_beside_nominated(pod, &Profile::default(), &mut snapshot);
            let found = filter(pod, &Profile::default(), &snapshot, refused_by_nominated);
            let found = found.unwrap_or_else(|error| panic!("{error:?}"));
            found.fitting.iter().map(|node| node.properties.name.as_str()).collect()
        };
        assert_eq!(fitting(&pod("low", 1, "2")), "b");
        assert_eq!(fitting(&pod("high", 20, "2")), "ab");
        assert_eq!(fitting(&pod("p", 10, "3")), "ab");
        snapshot.remove_nomination("p");
        let found = filter(&pod("low", 1, "2"), &Profile::default(), &snapshot, HashMap::new());
        assert_eq!(found.map(|found| found.fitting.len()).ok(), Some(2));
    }

    /// Source: `PreFilter` of upstream's InterPodAffinity, which returns `Skip`.
    #[test]
    fn terms_of_nominated_pods_count_only_for_a_pod_whose_affinity_is_not_skipped() {
        let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({})), fixture::node("b", json!({}))]);
        let term = json!({"labelSelector": {}, "topologyKey": "kubernetes.io/hostname"});
        let far = json!({"requiredDuringSchedulingIgnoredDuringExecution": [term]});
        let alone = |name: &str| fixture::pod(name, json!({"affinity": {"podAntiAffinity": far}}));
        let refused = |snapshot: &mut Snapshot| {
            let found =
                refused_beside_nominated(&fixture::pod("p", json!({})), &Profile::default(), snapshot);
            found.into_keys().collect::<Vec<_>>()
        };
        snapshot.nominate(&alone("nominated"), "a");
        assert!(refused(&mut snapshot).is_empty());
        snapshot.place(&alone("placed"), "b");
        assert_eq!(refused(&mut snapshot), ["a"]);
    }

    #[test]
    fn the_advice_of_extenders_changes_the_order_and_the_message() {
        let mut snapshot = fixture::snapshot(&[
            fixture::node("a", json!({})),
            fixture::node("b", json!({})),
            fixture::node("c", json!({"/spec/unschedulable": true})),
        ]);
        let (pod, profile) = (fixture::pod("p", json!({})), Profile::default());
        let ranked = rank(&pod, &profile, &mut snapshot).unwrap();
        let advice = |scores: &[(&str, i64)]| ExtenderResult {
            scores: scores.iter().map(|(node, score)| ((*node).to_owned(), *score)).collect(),
            refused: BTreeMap::new(),
        };
        assert_eq!(ranked.order(&advice(&[("a", 0), ("b", 0)])), ["a", "b"]);
        assert_eq!(ranked.order(&advice(&[("a", 0), ("b", 10)])), ["b", "a"]);
        assert_eq!(ranked.order(&advice(&[("a", 0), ("c", 10)])), ["a"], "only nodes that fit");
        snapshot.place(
            &fixture::pod("big", json!({"containers": [{"resources": {"requests": {"cpu": "4"}}}]})),
            "b",
        );
        let needs = fixture::pod("p", json!({"containers": [{"resources": {"requests": {"cpu": "1"}}}]}));
        let order = vec!["b".to_owned(), "a".to_owned()];
        assert_eq!(
            first_fitting(&needs, &profile, &mut snapshot, order).as_deref(),
            Some("a"),
            "b is full now"
        );
        let by = |reason: &str, resolvable| Refused {
            plugin: "Extender",
            reasons: vec![reason.to_owned()],
            resolvable,
            helped_by: Changes::ALL,
        };
        let refused = [("a".to_owned(), by("no licence", true)), ("b".to_owned(), by("no licence", false))];
        let refused =
            ranked.unschedulable(ExtenderResult { refused: refused.into(), ..ExtenderResult::default() });
        let message = "0/3 nodes are available: 1 node(s) were unschedulable, 2 no licence.";
        assert_eq!((refused.message.as_str(), refused.resolvable), (message, ["a".to_owned()].into()));
    }

    #[test]
    fn the_nominated_node_is_used_if_it_fits() {
        let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({})), fixture::node("b", json!({}))]);
        let profile = Profile::default();
        let container = |cpu: &str| json!([{"resources": {"requests": {"cpu": cpu}}}]);
        let nominated = |cpu: &str, node: &str| {
            let mut pod = fixture::pod("p", json!({"containers": container(cpu)}));
            pod.status.nominated_node_name = Some(node.to_owned());
            pod
        };
        snapshot.place(&fixture::pod("other", json!({"containers": container("2")})), "a");
        let mut node = |pod: &Pod| decide(pod, &profile, &mut snapshot).unwrap();
        assert_eq!(node(&nominated("1", "absent")), "b", "the better node");
        assert_eq!(node(&nominated("1", "a")), "a");
        assert_eq!(node(&nominated("3", "a")), "b", "the nominated node does not fit");
        let ranked = rank(&nominated("1", "a"), &profile, &mut snapshot).unwrap();
        assert_eq!((ranked.nodes.len(), ranked.only_nominated), (1, true));
        let ranked = rank(&nominated("3", "a"), &profile, &mut snapshot).unwrap();
        assert!(!ranked.only_nominated);
        let refused = decide(&nominated("5", "a"), &profile, &mut snapshot).unwrap_err();
        assert_eq!(refused.message, "0/2 nodes are available: 2 Insufficient cpu.");
        // As upstream, the nominated node has the reason of its filter, even if the node affinity names other nodes.
        let field = json!({"key": "metadata.name", "operator": "In", "values": ["b"]});
        let terms = json!({"nodeSelectorTerms": [{"matchFields": [field]}]});
        let mut named = nominated("5", "a");
        named.spec.affinity = serde_json::from_value(json!({"nodeAffinity":
            {"requiredDuringSchedulingIgnoredDuringExecution": terms}}))
        .unwrap();
        let refused = decide(&named, &profile, &mut snapshot).unwrap_err();
        let message = "0/2 nodes are available: 1 Insufficient cpu, \
                       1 node(s) didn't match Pod's node affinity/selector.";
        assert_eq!(refused.message, message);
    }

    #[test]
    fn a_search_ends_early_and_the_next_one_continues_there() {
        let nodes: Vec<_> =
            (0..250).map(|number| fixture::node(&format!("n{number:03}"), json!({}))).collect();
        let snapshot = fixture::snapshot(&nodes);
        let profile = Profile { percentage: 50, ..Profile::default() };
        let first = || {
            let found = filter(&fixture::pod("p", json!({})), &profile, &snapshot, HashMap::new());
            let found = found.unwrap_or_else(|error| panic!("{error:?}"));
            (found.fitting.len(), found.fitting[0].properties.name.clone())
        };
        assert_eq!(first(), (125, "n000".to_owned()));
        assert_eq!(first(), (125, "n125".to_owned()));
        assert_eq!(first(), (125, "n000".to_owned()));
        assert_eq!((wanted_nodes(1, 250), wanted_nodes(100, 250)), (100, 250));
        let by_default = [90, 250, 1000, 5000, 10_000].map(|nodes| wanted_nodes(0, nodes));
        assert_eq!(by_default, [100, 120, 420, 500, 500]);
    }

    #[test]
    fn contradictory_node_affinity_fits_no_node_and_preemption_does_not_help() {
        let labels = json!({"disk": "ssd"});
        let mut snapshot = fixture::snapshot(&[
            fixture::node("a", json!({"/metadata/labels": labels})),
            fixture::node("b", json!({})),
        ]);
        let expression = json!({"key": "disk", "operator": "NotIn", "values": ["ssd"]});
        let terms = json!([{"matchExpressions": [expression]}]);
        let required =
            json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}});
        let spec = json!({"nodeSelector": {"disk": "ssd"}, "affinity": {"nodeAffinity": required}});
        let refused = decide(&fixture::pod("p", spec), &Profile::default(), &mut snapshot).unwrap_err();
        let message = "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector.";
        assert_eq!((refused.message.as_str(), refused.helped_by), (message, Changes::NODE));
        assert!(refused.resolvable.is_empty());
    }

    #[test]
    fn nodes_that_the_affinity_does_not_name_are_left_out() {
        let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({})), fixture::node("b", json!({}))]);
        let named = |names: &[&[&str]]| {
            let fields =
                names.iter().map(|names| json!({"key": "metadata.name", "operator": "In", "values": names}));
            let term = json!({"matchFields": fields.collect::<Vec<_>>()});
            fixture::pod(
                "p",
                json!({"affinity": {"nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}}),
            )
        };
        let mut message = |pod: &Pod| decide(pod, &Profile::default(), &mut snapshot).unwrap_err().message;
        let none = "0/2 nodes are available: 2 node(s) didn't satisfy plugin(s) [NodeAffinity].";
        assert_eq!(message(&named(&[&["x"]])), none);
        let conflict = "0/2 nodes are available: pod affinity terms conflict.";
        assert_eq!(message(&named(&[&["a"], &["b"]])), conflict);
        assert_eq!(decide(&named(&[&["b"]]), &Profile::default(), &mut snapshot), Ok("b".to_owned()));
        // An extender refuses the named node.
        let ranked = rank(&named(&[&["b"]]), &Profile::default(), &mut snapshot).unwrap();
        let reasons = vec!["no licence".to_owned()];
        let by_extender = Refused { plugin: "Extender", reasons, resolvable: false, helped_by: Changes::ALL };
        let refused = [("b".to_owned(), by_extender)].into();
        let refused = ranked.unschedulable(ExtenderResult { refused, ..ExtenderResult::default() });
        let both =
            "0/2 nodes are available: 1 no licence, 1 node(s) didn't satisfy plugin(s) [NodeAffinity].";
        assert_eq!(refused.message, both);
        assert_eq!(refused.plugins, ["Extender", "NodeAffinity"].into());
    }
}
