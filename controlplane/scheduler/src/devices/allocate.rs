//! The search for devices of a node. The order of pools and devices is fixed, and the first complete solution is used.
//!
//! Source: `dynamic-resource-allocation/structured`.

mod result;
mod work;

use std::collections::HashMap;
use std::sync::Arc;

use coracle_values::object::ObjectExt;
use coracle_values::toleration::{forbids_scheduling, is_tolerated};
use serde_json::Value;

use super::allocated::{Allocated, DeviceId};
use super::capacity::{self, Consumption};
use super::counters::Counters;
use super::expression;
use super::object::{Claim, Class, Constraint, Device, Exact, Slice};
use super::places::{is_of_node, may_use};
use super::slices::{Slices, node_of};
use crate::node_properties::NodeProperties;
use work::{CHECK_WORK, DEVICE_WORK};
pub(super) use work::{TOO_MUCH_WORK, Work};

/// Maximum number of devices of a claim, as in the API.
const MAX_DEVICES: usize = 32;
/// Maximum number of devices that a search tries. Without a limit, contradictory constraints would block the scheduler.
const MAX_STEPS: usize = 20_000;

/// The reason why a search ended without a result.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The search on this node took too long.
    Node(String),
    /// A claim or class cannot be evaluated.
    Claim(String),
}

/// A device that can be allocated.
#[derive(Clone, Copy)]
struct Candidate<'a> {
    slice: &'a Slice,
    device: &'a Device,
}

/// The search for devices of one node.
pub(super) struct Allocator<'a> {
    classes: &'a HashMap<String, Class>,
    candidates: Vec<Candidate<'a>>,
    /// A pool whose slices are not complete.
    incomplete: Option<String>,
    in_use: &'a Allocated,
    counters: Counters<'a>,
    node: &'a NodeProperties,
    /// Cache of the selected devices of each request, by the request's address. The search visits a request many times.
    selections: HashMap<*const Exact, Selection<'a>>,
    steps: usize,
    /// The work of the searches of the attempt until now.
    work: &'a Work,
}

/// The devices that a request selects, in the order of the search.
#[derive(Clone)]
struct Selection<'a> {
    devices: Arc<[Selected<'a>]>,
    /// The selector error at the device that follows `devices`. The search fails only if it reaches this device.
    fault: Option<Arc<str>>,
}

/// A device that a request selects.
struct Selected<'a> {
    candidate: Candidate<'a>,
    /// The amounts of the device's capacities that the request consumes.
    consumed: Arc<[Consumption<'a>]>,
}

/// A request of a claim with its alternatives.
struct RequestChoices<'a> {
    claim: usize,
    /// The request or its alternatives, with their names.
    choices: Vec<(String, &'a Exact)>,
}

/// A chosen device.
struct Chosen<'a> {
    claim: usize,
    request: String,
    exact: &'a Exact,
    candidate: Candidate<'a>,
    /// Amounts of the device's capacities that the claim consumes. Empty if the claim uses the device alone.
    consumed: Arc<[Consumption<'a>]>,
    /// Whether the choice of the device consumes shared counters. Administrative access consumes no counters. If claims
    /// share a device, only the first claim consumes its counters.
    consumes_counters: bool,
}

// === impl Failure ===

impl From<Failure> for String {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Node(why) | Failure::Claim(why) => why,
        }
    }
}

// === impl Candidate ===

impl Candidate<'_> {
    fn id(&self) -> DeviceId {
        let spec = &self.slice.spec;
        DeviceId { driver: spec.driver.clone(), pool: spec.pool.name.clone(), name: self.device.name.clone() }
    }

    /// Whether both candidates have the same id. The ids are not copied, because a search compares many devices.
    fn has_id_of(&self, other: &Candidate<'_>) -> bool {
        let (own, others) = (&self.slice.spec, &other.slice.spec);
        self.device.name == other.device.name
            && own.pool.name == others.pool.name
            && own.driver == others.driver
    }
}

// === impl Allocator ===

impl<'a> Allocator<'a> {
    pub(super) fn new(
        classes: &'a HashMap<String, Class>,
        slices_of_pools: &'a Slices,
        in_use: &'a Allocated,
        node: &'a NodeProperties,
        work: &'a Work,
    ) -> Self {
        let (mut candidates, mut conditional) = (Vec::new(), Vec::new());
        let (mut incomplete, mut counters) = (None, Counters::default());
        for ((driver, pool), slices) in slices_of_pools.pools_of(&node.name) {
            let newest = slices.iter().map(|slice| slice.spec.pool.generation).max().unwrap_or_default();
            let newest: Vec<&Slice> =
                slices.into_iter().filter(|slice| slice.spec.pool.generation == newest).collect();
            let here: Vec<&Slice> = newest.iter().copied().filter(|slice| is_of_node(slice, node)).collect();
            let mut all = slices_of_pools.of_other_nodes(driver, pool, &newest, &node.name);
            all.extend(&newest);
            let is_complete = |slice: &&Slice| {
                usize::try_from(slice.spec.pool.resource_slice_count).is_ok_and(|count| count == all.len())
            };
            if !here.iter().all(is_complete) {
                incomplete = Some(format!("{driver}/{pool}"));
                continue;
            }
            counters.add_pool(&all, in_use);
            // Pools with binding conditions come last, because a pod with such a device must wait for the driver.
            let mut devices = here.iter().flat_map(|slice| &slice.spec.devices);
            let is_conditional = devices.any(|device| !device.binding_conditions.is_empty());
            let list = if is_conditional { &mut conditional } else { &mut candidates };
            list.extend(here.into_iter().flat_map(|slice| {
                let devices = slice.spec.devices.iter().filter(move |device| may_use(slice, device, node));
                devices.map(move |device| Candidate { slice, device })
            }));
        }
        candidates.append(&mut conditional);
        let selections = HashMap::new();
        Self { classes, candidates, incomplete, in_use, counters, node, selections, steps: 0, work }
    }

    /// The allocation of each claim. `None` if there are not enough devices.
    pub(super) fn allocate(mut self, claims: &'a [Claim]) -> Result<Option<Vec<Value>>, Failure> {
        let mut wanted = Vec::new();
        for (place, claim) in claims.iter().enumerate() {
            for request in &claim.spec.devices.requests {
                wanted.push(RequestChoices { claim: place, choices: request.exact() });
            }
        }
        let mut chosen = Vec::new();
        if !self.choose(claims, &wanted, &mut chosen)? {
            return Ok(None);
        }
        let results = claims.iter().enumerate().map(|(place, claim)| {
            let own: Vec<&Chosen<'a>> = chosen.iter().filter(|one| one.claim == place).collect();
            self.allocation(claim, &own)
        });
        Ok(Some(results.collect()))
    }

    /// Chooses devices for the first request, then for the other requests. If there are not enough devices, `chosen` is
    /// unchanged.
    fn choose(
        &mut self,
        claims: &[Claim],
        wanted: &[RequestChoices<'a>],
        chosen: &mut Vec<Chosen<'a>>,
    ) -> Result<bool, Failure> {
        let Some((first, rest)) = wanted.split_first() else { return Ok(true) };
        for (name, exact) in &first.choices {
            let selected = self.selected(exact, &claims[first.claim]).map_err(Failure::Claim)?;
            let count = match exact.allocation_mode.as_deref() {
                None | Some("" | "ExactCount") => {
                    usize::try_from(exact.count.unwrap_or(1)).unwrap_or_default()
                }
                Some("All") if self.incomplete.is_some() => {
                    let pool = self.incomplete.as_deref().unwrap_or_default();
                    return Err(Failure::Claim(format!(
                        "request {name}: asks for all devices, but resource pool {pool} is currently being updated"
                    )));
                }
                Some("All") => match &selected.fault {
                    Some(why) => return Err(Failure::Claim(why.to_string())),
                    None => selected.devices.len(),
                },
                Some(other) => {
                    return Err(Failure::Claim(format!("request {name}: unsupported count mode {other}")));
                }
            };
            let own = chosen.iter().filter(|one| one.claim == first.claim).count();
            let is_too_large = own.saturating_add(count) > MAX_DEVICES;
            let is_missing = count > selected.devices.len() && selected.fault.is_none();
            if count == 0 || is_too_large || is_missing {
                continue;
            }
            let step = Step { claims, first, rest, name, exact, selected: &selected };
            if self.fill(&step, 0, count, chosen)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Chooses `count` of the selected devices, starting at the index `from`. A request for all devices has only one
    /// choice. As upstream, it is a fault of the claim if its constraints contradict this choice.
    fn fill(
        &mut self,
        step: &Step<'_, 'a>,
        from: usize,
        count: usize,
        chosen: &mut Vec<Chosen<'a>>,
    ) -> Result<bool, Failure> {
        if count == 0 {
            return self.choose(step.claims, step.rest, chosen);
        }
        let claim = step.first.claim;
        for (place, selected) in step.selected.devices.iter().enumerate().skip(from) {
            self.steps += 1;
            if self.steps > MAX_STEPS {
                let why = "search for devices exceeded its limit; simplify the claims";
                return Err(Failure::Node(why.to_owned()));
            }
            let constraints = &step.claims[claim].spec.devices.constraints;
            self.work.add_step(chosen.len(), constraints.len());
            if self.work.is_too_much() {
                return Err(Failure::Claim(TOO_MUCH_WORK.to_owned()));
            }
            let Some(next) = self.usable(step, selected, chosen) else {
                if step.exact.needs_all() {
                    return Ok(false);
                }
                continue;
            };
            let (candidate, consumes_counters) = (next.candidate, next.consumes_counters);
            chosen.push(next);
            if consumes_counters {
                self.counters.take(candidate.slice, candidate.device);
            }
            let fits = constraints.iter().all(|constraint| meets_constraint(constraint, claim, chosen));
            if !fits && step.exact.needs_all() {
                return Err(Failure::Claim(step.contradiction(candidate)));
            }
            if fits && self.fill(step, place + 1, count - 1, chosen)? {
                return Ok(true);
            }
            chosen.pop();
            if consumes_counters {
                self.counters.release(candidate.slice, candidate.device);
            }
            if step.exact.needs_all() {
                return Ok(false);
            }
        }
        match &step.selected.fault {
            Some(why) => Err(Failure::Claim(why.to_string())),
            None => Ok(false),
        }
    }

    /// The device for the request of this step. `None` if the device is in use, or if the chosen devices leave too
    /// little capacity or counters.
    fn usable(
        &self,
        step: &Step<'_, 'a>,
        selected: &Selected<'a>,
        chosen: &[Chosen<'a>],
    ) -> Option<Chosen<'a>> {
        let (claim, candidate, exact) = (step.first.claim, selected.candidate, step.exact);
        let (id, node) = (candidate.id(), node_of(candidate.slice));
        let is_admin = exact.admin_access == Some(true);
        let is_shared = candidate.device.is_shared();
        let same: Vec<&Chosen<'a>> =
            chosen.iter().filter(|one| one.candidate.has_id_of(&candidate)).collect();
        let is_chosen = !is_shared && same.iter().any(|one| !is_admin || one.claim == claim);
        let has_shares = self.in_use.has_shares(&id, node);
        // A driver may set `allowMultipleAllocations` to false while claims still share the device.
        let is_used = !is_admin && (self.in_use.has(&id, node) || (has_shares && !is_shared));
        let shares: Vec<&[Consumption<'a>]> = same.iter().map(|one| &*one.consumed).collect();
        let is_tainted = exact.needs_all() && !tolerates(exact, candidate.device);
        if is_chosen || is_used || is_tainted || !capacity::suffices(&selected.consumed, &shares) {
            return None;
        }
        let is_counted = is_shared && (has_shares || same.iter().any(|one| one.consumes_counters));
        let consumes_counters = !is_admin && !is_counted;
        if consumes_counters && !self.counters.suffice(candidate.slice, candidate.device) {
            return None;
        }
        let (request, consumed) = (step.name.to_owned(), selected.consumed.clone());
        Some(Chosen { claim, request, exact, candidate, consumed, consumes_counters })
    }

    /// The devices that a request can use: class and request select them, the request tolerates their taints, and their
    /// capacity suffices. As upstream, a request for all devices also selects devices whose taints it does not
    /// tolerate. Then the request cannot be met. After the first faulty selector, no further device is evaluated.
    fn selected(&mut self, exact: &'a Exact, claim: &Claim) -> Result<Selection<'a>, String> {
        if let Some(known) = self.selections.get(&std::ptr::from_ref(exact)) {
            return Ok(known.clone());
        }
        let (name, classes) = (&exact.device_class_name, self.classes);
        let class = classes.get(name).ok_or_else(|| format!("device class {name} does not exist"))?;
        let needs_all = exact.needs_all() || exact.admin_access == Some(true);
        let (mut devices, mut fault) = (Vec::new(), None);
        for candidate in self.candidates.clone() {
            match self.is_selected(candidate, class, exact, claim) {
                Ok(true) if exact.needs_all() || tolerates(exact, candidate.device) => {
                    let node = node_of(candidate.slice);
                    let allocated = |name: &str| self.in_use.consumed(&candidate.id(), node, name);
                    if let Some(consumed) = capacity::consumed(candidate.device, exact, allocated) {
                        devices.push(Selected { candidate, consumed: consumed.into() });
                    }
                }
                Ok(_) => {}
                // The search skips a device in use, so a selector error at this device does not count.
                Err(_) if !needs_all && self.in_use.has(&candidate.id(), node_of(candidate.slice)) => {}
                Err(why) => {
                    fault = Some(why.into());
                    break;
                }
            }
        }
        let selection = Selection { devices: devices.into(), fault };
        self.selections.insert(std::ptr::from_ref(exact), selection.clone());
        Ok(selection)
    }

    /// Whether the class and the request select a device.
    fn is_selected(
        &self,
        candidate: Candidate<'a>,
        class: &Class,
        exact: &Exact,
        claim: &Claim,
    ) -> Result<bool, String> {
        let work = self.work;
        if work.is_too_much() {
            return Err(TOO_MUCH_WORK.to_owned());
        }
        work.add(CHECK_WORK);
        let of_class = class.spec.selectors.iter().enumerate().map(|(at, selector)| (true, at, selector));
        let of_request = exact.selectors.iter().enumerate().map(|(at, selector)| (false, at, selector));
        for (is_of_class, at, selector) in of_class.chain(of_request) {
            let failed = |why: &str| {
                let name = &exact.device_class_name;
                let of = if is_of_class { format!("class {name}") } else { format!("claim {}", claim.key()) };
                format!("{of}: selector #{at}: {why}")
            };
            let cel = selector.cel.as_ref().ok_or_else(|| failed("CEL expression empty"))?;
            if work.is_too_much() {
                return Err(TOO_MUCH_WORK.to_owned());
            }
            let program = work.program(&cel.expression);
            let program = (*program).as_ref().map_err(|why| failed(&format!("CEL compile error: {why}")))?;
            let (is_selected, cost) =
                expression::selects(program, &candidate.slice.spec.driver, candidate.device);
            work.add(cost.saturating_add(DEVICE_WORK));
            if !is_selected.map_err(|why| failed(&format!("CEL runtime error: {why}")))? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// A request, during the choice of its devices.
struct Step<'s, 'a> {
    claims: &'s [Claim],
    first: &'s RequestChoices<'a>,
    rest: &'s [RequestChoices<'a>],
    name: &'s str,
    exact: &'a Exact,
    selected: &'s Selection<'a>,
}

// === impl Step ===

impl Step<'_, '_> {
    /// The fault of a claim whose constraints exclude a device that the claim needs.
    fn contradiction(&self, candidate: Candidate<'_>) -> String {
        let claim = self.claims[self.first.claim].key();
        let request = self.name.rsplit_once('/').map_or(self.name, |(_, alternative)| alternative);
        let DeviceId { driver, pool, name } = candidate.id();
        format!(
            "claim {claim}, request {request}: cannot add device {driver}/{pool}/{name} because a claim constraint \
             would not be satisfied"
        )
    }
}

/// Whether a request tolerates the taints of a device.
fn tolerates(request: &Exact, device: &Device) -> bool {
    let mut taints = device.taints.iter().filter(|taint| forbids_scheduling(taint));
    taints.all(|taint| is_tolerated(taint, &request.tolerations))
}

/// Whether a name in a claim refers to this request. The name is the name of the request itself or, for an alternative,
/// the name of its parent request.
fn is_of_request(name: &str, request: &str) -> bool {
    name == request || request.strip_prefix(name).is_some_and(|rest| rest.starts_with('/'))
}

/// Whether the last chosen device meets a constraint together with the devices before it.
fn meets_constraint(constraint: &Constraint, claim: usize, chosen: &[Chosen<'_>]) -> bool {
    let concerns = |one: &&Chosen<'_>| {
        let names = &constraint.requests;
        one.claim == claim && (names.is_empty() || names.iter().any(|name| is_of_request(name, &one.request)))
    };
    let Some((last, before)) = chosen.split_last() else { return true };
    if !concerns(&last) {
        return true;
    }
    let value = |one: &Chosen<'_>, name: &str| {
        one.candidate.device.attribute(&one.candidate.slice.spec.driver, name).cloned()
    };
    let mut others = before.iter().filter(concerns);
    match (&constraint.match_attribute, &constraint.distinct_attribute) {
        (Some(name), _) => {
            let own = value(last, name);
            own.is_some() && others.all(|other| value(other, name) == own)
        }
        (None, Some(name)) => {
            let own = value(last, name);
            own.is_some() && others.all(|other| value(other, name) != own)
        }
        // An unknown constraint cannot be met.
        (None, None) => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::work::{COMPILATION_WORK, MAX_WORK};
    use super::*;

    #[test]
    fn the_devices_of_a_request_are_selected_once() {
        let class = json!({"metadata": {"name": "gpu"}, "spec": {"selectors": []}});
        let class: Class = serde_json::from_value(class).unwrap();
        let classes = HashMap::from([("gpu".to_owned(), class)]);
        let (slices, node) = (Slices::default(), NodeProperties::default());
        let exact = Exact { device_class_name: "gpu".to_owned(), ..Exact::default() };
        let in_use = Allocated::default();
        let work = Work::default();
        let mut allocator = Allocator::new(&classes, &slices, &in_use, &node, &work);
        let claim = Claim::default();
        let first = allocator.selected(&exact, &claim).unwrap();
        let second = allocator.selected(&exact, &claim).unwrap();
        assert!(Arc::ptr_eq(&first.devices, &second.devices));
    }

    #[test]
    fn the_work_of_the_searches_for_a_pod_is_limited() {
        let class = |selectors: Value| -> Class {
            serde_json::from_value(json!({"metadata": {"name": "gpu"}, "spec": {"selectors": selectors}}))
                .unwrap()
        };
        let slice = json!({"metadata": {"name": "s"}, "spec": {"driver": "d", "nodeName": "a",
            "pool": {"name": "a", "generation": 1, "resourceSliceCount": 1}, "devices": [{"name": "one"}]}});
        let mut slices = Slices::default();
        slices.insert(serde_json::from_value(slice).unwrap());
        let node = NodeProperties { name: "a".to_owned(), ..NodeProperties::default() };
        let (in_use, work) = (Allocated::default(), Work::default());

        let [first, second] =
            [(); 2].map(|()| Exact { device_class_name: "gpu".to_owned(), ..Exact::default() });
        let claim = Claim::default();
        let selectors = json!([{"cel": {"expression": "device.driver == 'd'"}}]);
        let classes = HashMap::from([("gpu".to_owned(), class(selectors))]);
        let mut allocator = Allocator::new(&classes, &slices, &in_use, &node, &work);
        assert_eq!(allocator.selected(&first, &claim).unwrap().devices.len(), 1);
        let done = work.done();
        assert!(done > DEVICE_WORK, "{done}");
        work.add(MAX_WORK);
        assert!(allocator.selected(&second, &claim).unwrap().fault.is_some());
        assert!(work.done() < MAX_WORK + 2 * done, "nothing was evaluated");

        // The work also includes each tried device.
        let classes = HashMap::from([("gpu".to_owned(), class(json!([])))]);
        let claim = json!({"metadata": {"name": "c"}, "spec": {"devices": {"requests": [
            {"name": "r", "exactly": {"deviceClassName": "gpu"}}]}}});
        let claims: [Claim; 1] = [serde_json::from_value(claim).unwrap()];
        let search = |work: &Work| Allocator::new(&classes, &slices, &in_use, &node, work).allocate(&claims);
        assert_eq!(search(&work), Err(Failure::Claim(TOO_MUCH_WORK.to_owned())));
        assert!(search(&Work::default()).unwrap().is_some());
    }

    #[test]
    fn compiled_selectors_and_compared_attributes_count_as_work() {
        let class = json!({"metadata": {"name": "gpu"}, "spec": {"selectors": []}});
        let classes = HashMap::from([("gpu".to_owned(), serde_json::from_value::<Class>(class).unwrap())]);
        let device = |name: &str| json!({"name": name, "attributes": {"a": {"string": "x"}}});
        let slice = json!({"metadata": {"name": "s"}, "spec": {"driver": "d", "nodeName": "a",
            "pool": {"name": "a", "generation": 1, "resourceSliceCount": 1},
            "devices": [device("one"), device("two")]}});
        let mut slices = Slices::default();
        slices.insert(serde_json::from_value(slice).unwrap());
        let node = NodeProperties { name: "a".to_owned(), ..NodeProperties::default() };
        let in_use = Allocated::default();
        let work_of = |selectors: &[&str], constraints: usize| {
            let selectors: Vec<Value> =
                selectors.iter().map(|text| json!({"cel": {"expression": text}})).collect();
            let request = json!({"name": "r",
                "exactly": {"deviceClassName": "gpu", "count": 2, "selectors": selectors}});
            let constraints = vec![json!({"matchAttribute": "d/a"}); constraints];
            let claim = json!({"metadata": {"name": "c"},
                "spec": {"devices": {"requests": [request], "constraints": constraints}}});
            let claims: [Claim; 1] = [serde_json::from_value(claim).unwrap()];
            let work = Work::default();
            let search = Allocator::new(&classes, &slices, &in_use, &node, &work).allocate(&claims);
            assert!(search.unwrap().is_some(), "{selectors:?}");
            work.done()
        };
        let least = 2 * (CHECK_WORK + DEVICE_WORK) + 1;
        assert_eq!(work_of(&[], 0), least, "two devices are checked, and then tried");
        assert_eq!(work_of(&[], 3), work_of(&[], 0) + 30, "the second device is compared with the first one");
        let work = Work::default();
        assert!(Arc::ptr_eq(&work.program("true"), &work.program("true")), "compiled once for all nodes");
        // The longer text has the same cost for each device.
        let long = format!("true{}", " ".repeat(100));
        assert_eq!(work_of(&[long.as_str()], 0), work_of(&["true"], 0) + 100 * COMPILATION_WORK);
    }
}
