//! Priority and fairness: each request from the network gets seats of its priority level, waits for them, or is
//! rejected.
//!
//! A flow schema (`schema`) selects the priority level and the flow of a request. The levels (`level`) share a fixed
//! number of seats. Requests of an exempt level need no seats. A watch holds its seats until its first events are
//! collected. Logs, streams and proxies need no seats, as upstream. `controllers/flow_control.rs` applies the stored
//! objects.

mod counts;
mod dump;
mod level;
mod note;
mod schema;

use std::{
    collections::{BTreeMap, BTreeSet},
    hash::{BuildHasher as _, RandomState},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use arc_swap::ArcSwap;
use coracle_kinds::flow_control as objects;
use coracle_values::CollectMap;
use http::HeaderValue;
use prometheus::proto::MetricFamily;
use serde_json::Value;

use crate::{
    authn::User,
    cache::Cache,
    error::{ApiError, Result},
    in_flight,
    reply::Reply,
    request::{Query, RequestInfo},
};
use counts::{Counts, Executing, Labels, SchemaCounts, Times};
pub(crate) use level::LevelCounts;
use level::{Admitted, LevelConfig, Levels, Rejection, Ticket};
use note::Note;
use schema::Schema;

/// Number of objects of a list request for each seat. Upstream uses this number if the gate `SizeBasedListCostEstimate`
/// is off. The gate is on by default since v1.34: then seats depend on the size of the objects.
const OBJECTS_PER_SEAT: u64 = 100;
/// Maximum seats of one request, as upstream with that gate off.
const MAX_SEATS: u64 = 10;
/// Divisor of the request timeout: a request waits at most for a quarter of it, as upstream.
const WAIT_PART: u32 = 4;

/// Seats and queues of the requests from the network.
pub(crate) struct FlowControl {
    table: ArcSwap<Table>,
    levels: Arc<Mutex<Levels>>,
    /// Seats of all limited levels.
    seats: u64,
    max_wait: Duration,
    /// Random key of the hash. Without this key a client could choose a user name that shares the queues of another
    /// user.
    hasher: RandomState,
    times: Times,
}

/// The schemas in the order of their precedence.
#[derive(Default)]
struct Table {
    rows: Vec<Row>,
}

/// A schema with an existing level.
struct Row {
    schema: Schema,
    level: u64,
    level_uid: String,
    /// Whether requests of the level never wait.
    is_exempt: bool,
    counts: Arc<Counts>,
}

/// The seats of a request. Dropping it releases them.
pub(crate) struct Seats {
    levels: Arc<Mutex<Levels>>,
    ticket: Ticket,
    note: Arc<Note>,
    since: Instant,
    /// Counts the request as executing. `None` while the request waits.
    executing: Option<Executing>,
}

/// The seats that a request needs, and its flow.
struct SeatRequest {
    seats: u64,
    flow: u64,
    is_watch: bool,
    note: Arc<Note>,
}

/// The schema and the level of a request, for its response.
#[derive(Clone)]
pub(crate) struct Classified {
    schema: Option<HeaderValue>,
    level: Option<HeaderValue>,
}

// === impl FlowControl ===

impl FlowControl {
    /// Creates the levels and schemas of the mandatory objects. [`FlowControl::configure`] adds the other objects.
    pub(crate) fn new(seats: u64, request_timeout: Duration) -> Self {
        let made = Self {
            table: ArcSwap::default(),
            levels: Arc::default(),
            seats,
            max_wait: request_timeout / WAIT_PART,
            hasher: RandomState::new(),
            times: Times::new(),
        };
        made.configure(&[], &[]);
        made
    }

    /// Applies the stored schemas and levels. Missing mandatory objects are added.
    pub(crate) fn configure(&self, schemas: &[Value], levels: &[Value]) {
        let configs: Vec<LevelConfig> = with_mandatory(levels, objects::mandatory_levels())
            .map(|object| LevelConfig::read(&object))
            .collect();
        let uids: BTreeMap<String, String> =
            configs.iter().map(|config| (config.name.clone(), config.uid.clone())).collect_map();
        let exempt: BTreeSet<String> =
            configs.iter().filter(|config| config.is_exempt).map(|config| config.name.clone()).collect();
        let former = self.table.load();
        let mut all = self.lock();
        all.configure(configs, self.seats);
        let mut rows: Vec<Row> = with_mandatory(schemas, objects::mandatory_schemas())
            .filter_map(|object| {
                let schema = Schema::read(&object);
                let level_uid = uids.get(&schema.level)?.clone();
                let level = all.id(&schema.level)?;
                let same = |row: &&Row| row.schema.name == schema.name && row.schema.level == schema.level;
                let counts = former.rows.iter().find(same).map(|row| row.counts.clone()).unwrap_or_default();
                let is_exempt = exempt.contains(&schema.level);
                Some(Row { schema, level, level_uid, is_exempt, counts })
            })
            .collect();
        rows.sort_by(|a, b| {
            let key = |row: &Row| (row.schema.precedence, row.schema.name.clone());
            key(a).cmp(&key(b))
        });
        drop(all);
        let same = |row: &Row, other: &Row| row.labels() == other.labels();
        for row in former.rows.iter().filter(|row| !rows.iter().any(|new| same(row, new))) {
            self.times.forget(row.labels());
        }
        self.table.store(Arc::new(Table { rows }));
    }

    /// Waits for the seats of a request. Long-running requests other than watches need no seats.
    ///
    /// # Errors
    /// The request is rejected. The error contains the time before a retry. The classification is returned with the
    /// error, too.
    pub(crate) async fn enter(
        &self,
        user: &User,
        info: &RequestInfo,
        cache: &Cache,
    ) -> (Option<Classified>, Result<Option<Seats>>) {
        if in_flight::is_long_running(info) && info.verb != "watch" {
            return (None, Ok(None));
        }
        let table = self.table.load_full();
        let row = table.rows.iter().find(|row| row.schema.matches(user, info)).or_else(|| table.rows.last());
        let Some(row) = row else { return (None, Ok(None)) };
        let value = |uid: &str| HeaderValue::from_str(uid).ok().filter(|uid| !uid.is_empty());
        let classified = Classified { schema: value(&row.schema.uid), level: value(&row.level_uid) };
        let needed = SeatRequest {
            seats: wanted_seats(info, cache),
            flow: self.hasher.hash_one((&row.schema.name, row.schema.flow(user, info))),
            is_watch: info.verb == "watch",
            note: Arc::new(Note::new(&row.schema, user, info)),
        };
        let entered = self.seats_of(row, &needed).await;
        (Some(classified), entered.map(Some))
    }

    async fn seats_of(&self, row: &Row, needed: &SeatRequest) -> Result<Seats> {
        let began = Instant::now();
        let (ticket, admitted) = {
            let mut levels = self.lock();
            let width = levels.width(row.level, needed.seats);
            let (ticket, admitted) = levels.admit(row.level, width, needed.flow);
            if !matches!(admitted, Admitted::Rejected(_)) {
                levels.note(ticket, needed.note.clone());
            }
            (ticket, admitted)
        };
        let refused = |why: Rejection| {
            row.counts.reject(why);
            self.waited(row, began, false);
            ApiError::too_many_requests()
        };
        if let Admitted::Rejected(why) = admitted {
            return Err(refused(why));
        }
        let width = ticket.width;
        let (levels, note) = (self.levels.clone(), needed.note.clone());
        let mut seats = Seats { levels, ticket, note, since: Instant::now(), executing: None };
        if let Admitted::Waiting(runs) = admitted {
            let queued = row.counts.queue(width);
            let admitted = tokio::time::timeout(self.max_wait, runs).await;
            drop(queued);
            if !matches!(admitted, Ok(Ok(()))) {
                return Err(refused(Rejection::TimeOut));
            }
            seats.since = Instant::now();
        }
        self.waited(row, began, true);
        seats.note.start();
        seats.executing = Some(self.times.execute(&row.counts, row.labels(), needed.is_watch, width));
        Ok(seats)
    }

    /// Counts the time of a request in its queue. `executed` is true if the request got its seats. Requests of exempt
    /// levels have no queue, and are not counted.
    fn waited(&self, row: &Row, began: Instant, executed: bool) {
        if !row.is_exempt {
            self.times.waited(&row.counts, row.labels(), executed, began.elapsed());
        }
    }

    /// The waiting and execution times of requests, for metrics.
    pub(crate) fn times(&self) -> Vec<MetricFamily> {
        self.times.collect()
    }

    /// The levels, for metrics.
    pub(crate) fn levels(&self) -> Vec<LevelCounts> {
        self.lock().counts()
    }

    /// The page of this name below `/debug/api_priority_and_fairness`. `None` if no page has this name.
    pub(crate) fn debug_page(&self, name: &str, query: &Query) -> Option<String> {
        // The lock is released before the text is made.
        let levels = || self.lock().digest();
        let requests = || self.lock().requests();
        match name {
            "dump_priority_levels" => Some(dump::priority_levels(&levels(), &self.schemas())),
            "dump_queues" => Some(dump::queues(&levels())),
            "dump_requests" => {
                Some(dump::requests(requests(), !query.get("includeRequestDetails").is_empty()))
            }
            _ => None,
        }
    }

    /// The schemas, for metrics.
    pub(crate) fn schemas(&self) -> Vec<SchemaCounts> {
        self.table.load().rows.iter().map(|row| row.counts.read(row.labels())).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Levels> {
        lock(&self.levels)
    }
}

fn lock(levels: &Mutex<Levels>) -> MutexGuard<'_, Levels> {
    levels.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The stored objects and the missing mandatory objects.
fn with_mandatory(stored: &[Value], mandatory: Vec<Value>) -> impl Iterator<Item = Value> {
    let name = |object: &Value| object["metadata"]["name"].clone();
    let missing =
        mandatory.into_iter().filter(move |one| !stored.iter().any(|other| name(other) == name(one)));
    stored.iter().cloned().chain(missing.collect::<Vec<_>>())
}

/// Seats that a request needs. For a list the number grows with the number of objects.
fn wanted_seats(info: &RequestInfo, cache: &Cache) -> u64 {
    let lists = info.verb == "list" || (info.verb == "watch" && info.query.flag("sendInitialEvents"));
    let Some(path) = info.resource.as_ref().filter(|_| lists) else { return 1 };
    seats_for(info, cache.count(&path.group, &path.resource))
}

/// Seats for a list, or for a watch that begins with all objects. `objects` is the number of stored objects. The
/// `limit` of the query applies to lists only.
fn seats_for(info: &RequestInfo, objects: u64) -> u64 {
    let limit = if info.verb == "list" { info.query.page_limit() } else { usize::MAX };
    let limit = u64::try_from(limit).unwrap_or(u64::MAX);
    objects.min(limit).div_ceil(OBJECTS_PER_SEAT).clamp(1, MAX_SEATS)
}

// === impl Row ===

impl Row {
    /// Names of the level and the schema.
    fn labels(&self) -> Labels<'_> {
        Labels { level: &self.schema.level, schema: &self.schema.name }
    }
}

// === impl Seats ===

impl Drop for Seats {
    fn drop(&mut self) {
        let used = u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX);
        lock(&self.levels).end(&self.ticket, used);
    }
}

// === impl Classified ===

impl Classified {
    /// Adds the uids of schema and level to the response.
    pub(crate) fn mark(self, reply: &mut Reply) {
        let headers = reply.headers_mut();
        if let Some(uid) = self.schema {
            headers.insert("x-kubernetes-pf-flowschema-uid", uid);
        }
        if let Some(uid) = self.level {
            headers.insert("x-kubernetes-pf-prioritylevel-uid", uid);
        }
    }
}

#[cfg(test)]
mod tests {
    use http::Method;

    use super::*;

    fn control() -> FlowControl {
        let control = FlowControl::new(20, Duration::from_secs(60));
        let (levels, schemas) = (objects::suggested_levels(), objects::suggested_schemas());
        control.configure(&schemas, &levels);
        control
    }

    fn row_of(control: &FlowControl, user: &User, method: Method, uri: &str) -> String {
        let info = RequestInfo::parse(&method, &uri.parse().unwrap());
        let table = control.table.load();
        table.rows.iter().find(|row| row.schema.matches(user, &info)).unwrap().schema.name.clone()
    }

    #[test]
    fn the_objects_of_every_cluster_classify_as_upstream() {
        let control = control();
        let node = User::new("system:node:n", &["system:nodes"]);
        for (user, method, uri, schema) in [
            (&User::new("a", &["system:masters"]), Method::GET, "/api/v1/pods", "exempt"),
            (&User::new("a", &[]), Method::GET, "/readyz", "probes"),
            (&node, Method::PATCH, "/api/v1/nodes/n/status", "system-node-high"),
            (&node, Method::GET, "/api/v1/pods", "system-nodes"),
            (&User::new("a", &[]), Method::GET, "/api/v1/pods", "global-default"),
            (
                &User::new("system:serviceaccount:kube-system:x", &["system:serviceaccounts"]),
                Method::GET,
                "/api/v1/pods",
                "kube-system-service-accounts",
            ),
            (
                &User::new("system:serviceaccount:n:x", &["system:serviceaccounts"]),
                Method::GET,
                "/api/v1/pods",
                "service-accounts",
            ),
        ] {
            assert_eq!(row_of(&control, user, method, uri), schema, "{uri}");
        }
    }

    #[test]
    fn an_ignored_limit_saves_no_seats() {
        for (query, expect) in [
            ("", 5),
            ("limit=1", 1),
            ("limit=201", 3),
            ("limit=1&resourceVersion=0", 5),
            ("limit=1&watch=1&sendInitialEvents=true", 5),
        ] {
            let info = RequestInfo::parse(&Method::GET, &format!("/api/v1/pods?{query}").parse().unwrap());
            assert_eq!(seats_for(&info, 450), expect, "{query}");
        }
    }

    /// The number of recorded waits of requests of the default schema.
    fn waits_of_default(control: &FlowControl, executed: &str) -> u64 {
        let families = control.times();
        let waits = families.iter().find(|family| family.name().ends_with("_wait_duration_seconds"));
        let is_wanted = |metric: &&prometheus::proto::Metric| {
            let has = |value: &str| metric.get_label().iter().any(|label| label.value() == value);
            has("global-default") && has(executed)
        };
        let metric = waits.unwrap().get_metric().iter().find(is_wanted).unwrap();
        metric.get_histogram().get_sample_count()
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_without_a_seat_waits_then_is_refused_and_leaves_nothing() {
        let control = control();
        let cache = Cache::new(0);
        let info = RequestInfo::parse(&Method::GET, &"/api/v1/namespaces/a/pods/b".parse().unwrap());
        let (user, root) = (User::new("a", &[]), User::new("r", &["system:masters"]));
        let mut held = Vec::new();
        let refused = loop {
            match control.enter(&user, &info, &cache).await.1 {
                Ok(seats) => held.push(seats),
                Err(error) => break error,
            }
        };
        assert_eq!((refused.code, refused.details["retryAfterSeconds"].as_u64()), (429, Some(1)));
        assert!(held.len() < 20, "{}", held.len());
        assert!(control.enter(&root, &info, &cache).await.1.is_ok());
        let node = User::new("system:node:n", &["system:nodes"]);
        assert!(control.enter(&node, &info, &cache).await.1.is_ok(), "the seats of nodes are reserved");
        let now = |schema: &str| {
            let all = control.schemas();
            let counts = all.iter().find(|one| one.schema == schema).unwrap();
            [counts.waiting, counts.executing]
        };
        let number = u64::try_from(held.len()).unwrap();
        assert_eq!(now("global-default"), [[0, 0], [number, number]]);
        let rows = || control.debug_page("dump_requests", &Query::default()).unwrap().lines().count() - 1;
        assert_eq!(rows(), held.len(), "neither the refused nor the ended requests");
        let waits = control.enter(&user, &info, &cache);
        let leaves = async {
            tokio::task::yield_now().await;
            held.pop();
        };
        let leaves = async {
            tokio::task::yield_now().await;
            assert_eq!(now("global-default"), [[1, 1], [number, number]], "one request waits for one seat");
            let page = control.debug_page("dump_requests", &Query::default()).unwrap();
            assert_eq!(page.matches("0001-01-01T00:00:00Z").count(), 1, "{page}");
            leaves.await;
        };
        assert!(tokio::join!(waits, leaves).0.1.is_ok());
        held.clear();
        assert_eq!((now("global-default"), rows()), ([[0, 0], [0, 0]], 0));
        assert!(control.levels().iter().all(|level| (level.waiting, level.seats_in_use) == (0, 0)));
        let counts = control.schemas();
        let default = counts.iter().find(|one| one.schema == "global-default").unwrap();
        assert_eq!(default.rejected[2], ("time-out", 1));
        let times = |executed: &str| waits_of_default(&control, executed);
        assert_eq!((times("true"), times("false")), (default.dispatched, 1));
        let is_shown = |schema: &str| {
            let families = control.times();
            let waits = families.iter().filter(|family| family.name().ends_with("_wait_duration_seconds"));
            let mut labels = waits.flat_map(|family| family.get_metric()).flat_map(|one| one.get_label());
            labels.any(|label| label.value() == schema)
        };
        assert!(is_shown("global-default") && !is_shown("exempt"), "exempt requests have no queue");
        control.configure(&[], &[]);
        assert!(!is_shown("global-default"), "the schema does not exist any more");
    }
}
