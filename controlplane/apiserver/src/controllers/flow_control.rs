//! Controller of flow schemas and priority levels. It applies them, maintains the default objects, and writes the
//! condition `Dangling`. It runs when an object changes.
//!
//! Servers of different versions on one store have different default objects. As upstream, each server writes its own
//! defaults at its start, and afterwards at most once a minute. Otherwise the servers would overwrite each other's
//! objects without a pause.
//!
//! Source: `k8s.io/apiserver/pkg/util/flowcontrol/apf_controller.go`, `.../flowcontrol/ensurer`.

use std::{
    collections::BTreeSet,
    sync::{Arc, Weak},
    time::Duration,
};

use coracle_kinds::{Resource, flow_control as objects, kind::by_kind};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::{
    cache::{Events, Scope, Watcher, prefix_of},
    call::Call,
    error::{ApiError, Result},
    field_manager::Writer,
    state::State,
    verb,
    write::{self, Part},
};

/// Annotation of default objects whose spec this server maintains.
const AUTO_UPDATE: &str = "apf.kubernetes.io/autoupdate-spec";

/// Minimum time between two corrections of the default objects, as upstream.
const CORRECTION_INTERVAL: Duration = Duration::from_secs(60);

/// Limits the rate of corrections of the default objects.
#[derive(Default)]
struct CorrectionTimer {
    last: Option<Instant>,
    /// Time of the next correction. `None` if no object needs a correction.
    due: Option<Instant>,
}

/// Creates missing default objects, applies all objects, and starts to watch them.
pub(crate) async fn start(state: &Arc<State>) {
    let kind = |name| by_kind(objects::API_VERSION, name).cloned();
    let kinds = kind("FlowSchema").zip(kind("PriorityLevelConfiguration"));
    let Some((schemas, levels)) = kinds else { return };
    // The first correction after the start is not delayed.
    follow(state, &schemas, &levels, &mut CorrectionTimer::default()).await;
    coracle_threads::spawn(run(Arc::downgrade(state), schemas, levels));
}

async fn run(state: Weak<State>, schemas: Arc<Resource>, levels: Arc<Resource>) {
    let mut timer = CorrectionTimer::default();
    loop {
        let Some(strong) = state.upgrade() else { return };
        let watches = watch(&strong, &schemas).and_then(|first| Ok((first, watch(&strong, &levels)?)));
        let Ok((mut of_schemas, mut of_levels)) = watches else { return };
        let shutdown = strong.shutdown.clone();
        drop(strong);
        loop {
            let Some(strong) = state.upgrade() else { return };
            follow(&strong, &schemas, &levels, &mut timer).await;
            drop(strong);
            // Cancel-safe: dropping the receive loses no event.
            let has_ended = tokio::select! {
                event = of_schemas.recv() => event.is_none(),
                event = of_levels.recv() => event.is_none(),
                () = timer.wait() => false,
                () = shutdown.cancelled() => return,
            };
            if has_ended {
                break;
            }
        }
    }
}

fn watch(state: &Arc<State>, kind: &Arc<Resource>) -> Result<Events> {
    let scope = Scope { prefix: prefix_of(kind, ""), ..Scope::default() };
    let (watcher, events) = Watcher::new(scope, false);
    let _initial = state.cache.of(kind)?.lock().watch_from_now(watcher, state.cache.revision());
    Ok(events)
}

fn values(state: &State, kind: &Resource) -> Vec<Value> {
    state.cache.list(kind, "").iter().map(|object| object.value()).collect()
}

/// Applies all objects, corrects the default objects if the timer permits it, and writes the conditions.
async fn follow(
    state: &Arc<State>,
    schemas: &Arc<Resource>,
    levels: &Arc<Resource>,
    timer: &mut CorrectionTimer,
) {
    let (of_schemas, of_levels) = (values(state, schemas), values(state, levels));
    state.flow_control.configure(&of_schemas, &of_levels);
    // Default schemas refer to levels, so levels are created first.
    let sets = [
        (levels, &of_levels, objects::mandatory_levels(), objects::suggested_levels()),
        (schemas, &of_schemas, objects::mandatory_schemas(), objects::suggested_schemas()),
    ];
    let steps = sets.map(|(kind, stored, mandatory, suggested)| (kind, plan(stored, &mandatory, &suggested)));
    let is_wanted = steps.iter().any(|(_, steps)| !steps.is_empty());
    let may_run = timer.take(is_wanted, Instant::now());
    for (kind, steps) in steps.into_iter().filter(|_| may_run) {
        for step in steps {
            if let Err(error) = step.run(state, kind).await {
                tracing::warn!(error = %error, "cannot maintain a default flow schema or priority level");
            }
        }
    }
    let names: BTreeSet<&str> = of_levels.iter().map(|level| write::text(level, "name")).collect();
    for schema in &of_schemas {
        let condition = dangling(schema, &names);
        if let Some(condition) = condition {
            write_condition(state, schemas, write::text(schema, "name"), &condition).await;
        }
    }
}

/// A change of a default object.
#[derive(Debug, PartialEq)]
enum Step {
    Create(Value),
    /// Sets the default spec and the annotation on the stored object.
    Correct(Value),
    /// Sets the annotation to false on the stored object: administrators maintain its spec.
    Leave(String),
    /// Deletes an object that an earlier version of the server created, if its revision is unchanged since the
    /// annotation was read.
    Delete {
        name: String,
        revision: String,
    },
}

// === impl CorrectionTimer ===

impl CorrectionTimer {
    /// Whether a needed correction may run now. If it must wait, sets its due time.
    fn take(&mut self, is_wanted: bool, now: Instant) -> bool {
        let earliest = self.last.map(|last| last + CORRECTION_INTERVAL).filter(|earliest| now < *earliest);
        self.due = earliest.filter(|_| is_wanted);
        let is_now = is_wanted && earliest.is_none();
        if is_now {
            self.last = Some(now);
        }
        is_now
    }

    /// Waits until a correction is due.
    async fn wait(&self) {
        match self.due {
            Some(due) => tokio::time::sleep_until(due).await,
            None => std::future::pending().await,
        }
    }
}

/// The changes that the stored objects need. Mandatory objects always get the default spec. Suggested objects get it if
/// their annotation is true. As upstream, a missing annotation counts as true if the spec was never changed.
fn plan(stored: &[Value], mandatory: &[Value], suggested: &[Value]) -> Vec<Step> {
    let mut steps = Vec::new();
    let find = |list: &[Value], name: &str| list.iter().find(|one| write::text(one, "name") == name).cloned();
    for wanted in mandatory.iter().chain(suggested) {
        let name = write::text(wanted, "name");
        let Some(found) = find(stored, name) else {
            steps.push(Step::Create(wanted.clone()));
            continue;
        };
        let annotated = annotation(&found);
        let is_ours = find(mandatory, name).is_some()
            || annotated.unwrap_or_else(|| found["metadata"]["generation"].as_i64().unwrap_or(1) == 1);
        if is_ours && (annotated != Some(true) || fixed(&found) != fixed(wanted)) {
            steps.push(Step::Correct(wanted.clone()));
        } else if annotated.is_none() && !is_ours {
            steps.push(Step::Leave(name.to_owned()));
        }
    }
    for object in stored.iter().filter(|object| annotation(object) == Some(true)) {
        let name = write::text(object, "name");
        if find(mandatory, name).or_else(|| find(suggested, name)).is_none() {
            let revision = write::text(object, "resourceVersion").to_owned();
            steps.push(Step::Delete { name: name.to_owned(), revision });
        }
    }
    steps
}

/// The value of the annotation: true if the server maintains the spec. `None` if the annotation is missing or invalid.
fn annotation(object: &Value) -> Option<bool> {
    object["metadata"]["annotations"][AUTO_UPDATE].as_str()?.parse().ok()
}

/// The part of the spec that administrators cannot change. They can change the numbers of the exempt level.
fn fixed(object: &Value) -> Value {
    let mut spec = object["spec"].clone();
    if spec["type"] == "Exempt"
        && let Some(spec) = spec.as_object_mut()
    {
        spec.remove("exempt");
    }
    spec
}

// === impl Step ===

impl Step {
    async fn run(&self, state: &Arc<State>, kind: &Arc<Resource>) -> Result<()> {
        let done = match self {
            Self::Create(object) => {
                let call = Call::internal(state, kind.clone(), object);
                write::create(&call, object.clone(), Writer::Update).await.map(drop)
            }
            Self::Correct(wanted) => {
                let call = Call::internal(state, kind.clone(), wanted);
                let name = write::text(wanted, "name");
                let written = write::update(&call, name, Part::Main, Writer::Update, |old| {
                    let mut new = annotated(old, true);
                    // The numbers of the exempt level alone cause no correction: administrators can change them.
                    if let Some(object) = new.as_object_mut().filter(|_| fixed(old) != fixed(wanted)) {
                        object.insert("spec".to_owned(), wanted["spec"].clone());
                    }
                    Ok(new)
                });
                written.await.map(drop)
            }
            Self::Leave(name) => {
                let object = json!({"metadata": {"name": name}});
                let call = Call::internal(state, kind.clone(), &object);
                let written = write::update(&call, name, Part::Main, Writer::Update, |old| {
                    // Another server or an administrator may have set the annotation meanwhile.
                    Ok(if annotation(old).is_none() { annotated(old, false) } else { old.clone() })
                });
                written.await.map(drop)
            }
            Self::Delete { name, revision } => {
                let object = json!({"metadata": {"name": name}});
                let call = Call::internal(state, kind.clone(), &object);
                let options = verb::delete::Options::default().at(revision);
                verb::delete::one(&call, name, &options).await.map(drop)
            }
        };
        match done {
            // Another API server wrote the object first.
            Err(ApiError { code: 404 | 409, .. }) => Ok(()),
            done => done,
        }
    }
}

/// The object with the annotation.
fn annotated(object: &Value, is_ours: bool) -> Value {
    let mut object = object.clone();
    let metadata = object.get_mut("metadata").and_then(Value::as_object_mut);
    let annotations = metadata.map(|metadata| metadata.entry("annotations").or_insert_with(|| json!({})));
    if let Some(annotations) = annotations.and_then(Value::as_object_mut) {
        annotations.insert(AUTO_UPDATE.to_owned(), is_ours.to_string().into());
    }
    object
}

/// The condition to write for a schema. `None` if the schema already has it.
fn dangling(schema: &Value, levels: &BTreeSet<&str>) -> Option<Value> {
    let level = schema["spec"]["priorityLevelConfiguration"]["name"].as_str().unwrap_or_default();
    let (status, reason, message) = match levels.contains(level) {
        true => (
            "False",
            "Found",
            format!(
                "This FlowSchema references the PriorityLevelConfiguration object named {level:?} and it exists"
            ),
        ),
        false => (
            "True",
            "NotFound",
            format!(
                "This FlowSchema references the PriorityLevelConfiguration object named {level:?} but there is no such object"
            ),
        ),
    };
    let known = condition(schema);
    let fields = [("status", status), ("reason", reason), ("message", message.as_str())];
    if known.is_some_and(|known| fields.iter().all(|(field, value)| known[*field] == *value)) {
        return None;
    }
    Some(json!({"type": "Dangling", "status": status, "reason": reason, "message": message}))
}

fn condition(schema: &Value) -> Option<&Value> {
    schema["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == "Dangling")
}

async fn write_condition(state: &Arc<State>, kind: &Arc<Resource>, name: &str, wanted: &Value) {
    let object = json!({"metadata": {"name": name}});
    let call = Call::internal(state, kind.clone(), &object);
    let written = write::update(&call, name, Part::Status, Writer::Update, |old| Ok(with(old, wanted)));
    match written.await {
        Ok(_) | Err(ApiError { code: 404 | 409, .. }) => {}
        Err(error) => tracing::warn!(name, error = %error, "cannot write the status of a flow schema"),
    }
}

/// The schema with the condition. The transition time changes only with the status.
fn with(schema: &Value, wanted: &Value) -> Value {
    let kept = condition(schema).filter(|known| known["status"] == wanted["status"]);
    let since = kept.map_or_else(|| write::now().into(), |known| known["lastTransitionTime"].clone());
    let mut wanted = wanted.clone();
    if let Some(wanted) = wanted.as_object_mut() {
        wanted.insert("lastTransitionTime".to_owned(), since);
    }
    let others = schema["status"]["conditions"].as_array().into_iter().flatten();
    let mut conditions: Vec<Value> = others.filter(|one| one["type"] != "Dangling").cloned().collect();
    conditions.push(wanted);
    let mut schema = schema.clone();
    if let Some(schema) = schema.as_object_mut() {
        schema.insert("status".to_owned(), json!({"conditions": conditions}));
    }
    schema
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_objects_are_maintained_unless_an_administrator_maintains_them() {
        let (mandatory, suggested) = (objects::mandatory_levels(), objects::suggested_levels());
        let all = [mandatory.clone(), suggested.clone()].concat();
        assert_eq!(plan(&all, &mandatory, &suggested), []);
        assert_eq!(plan(&[], &mandatory, &suggested).len(), all.len());
        let change = |name: &str, field: &str, value: Value| {
            let mut all = all.clone();
            let one = all.iter_mut().find(|one| one["metadata"]["name"] == name).unwrap();
            *one.pointer_mut(field).unwrap() = value;
            plan(&all, &mandatory, &suggested).len()
        };
        assert_eq!(change("catch-all", "/spec/limited/nominalConcurrencyShares", json!(7)), 1);
        assert_eq!(change("exempt", "/spec/exempt/lendablePercent", json!(7)), 0);
        assert_eq!(change("system", "/spec/limited/nominalConcurrencyShares", json!(7)), 1);
        let mut own = all.clone();
        let system = own.iter_mut().find(|one| one["metadata"]["name"] == "system").unwrap();
        system["spec"]["limited"]["nominalConcurrencyShares"] = json!(7);
        system["metadata"]["annotations"][AUTO_UPDATE] = json!("false");
        assert_eq!(plan(&own, &mandatory, &suggested), []);
        let mut old = all.clone();
        let annotations = json!({AUTO_UPDATE: "true"});
        old.push(json!({"metadata": {"name": "old", "resourceVersion": "7", "annotations": annotations}}));
        let delete = Step::Delete { name: "old".to_owned(), revision: "7".to_owned() };
        assert_eq!(plan(&old, &mandatory, &suggested), [delete]);
    }

    #[test]
    fn the_annotation_decides_whether_the_server_maintains_a_spec() {
        let wanted = objects::suggested_levels();
        let with = |annotation: Value, generation: i64, shares: i64| {
            let mut one = wanted[0].clone();
            one["metadata"]["annotations"] = annotation;
            one["metadata"]["generation"] = generation.into();
            one["spec"]["limited"]["nominalConcurrencyShares"] = shares.into();
            one
        };
        let (correct, leave) =
            (Step::Correct(wanted[0].clone()), Step::Leave(write::text(&wanted[0], "name").to_owned()));
        let own = wanted[0]["spec"]["limited"]["nominalConcurrencyShares"].as_i64().unwrap();
        for (stored, is_mandatory, step) in [
            (with(json!({AUTO_UPDATE: "true"}), 3, 7), false, Some(&correct)),
            (with(json!({AUTO_UPDATE: "false"}), 1, 7), false, None),
            (with(json!({AUTO_UPDATE: "maybe"}), 1, 7), false, Some(&correct)),
            (with(json!({}), 1, own), false, Some(&correct)),
            (with(Value::Null, 2, own), false, Some(&leave)),
            (with(json!({}), 2, 7), true, Some(&correct)),
            (with(json!({AUTO_UPDATE: "false"}), 2, own), true, Some(&correct)),
        ] {
            let one = &wanted[..1];
            let (mandatory, suggested) = if is_mandatory { (one, &[][..]) } else { (&[][..], one) };
            let steps = plan(std::slice::from_ref(&stored), mandatory, suggested);
            assert_eq!(steps.first(), step, "{stored}");
        }
        for is_ours in [true, false] {
            assert_eq!(annotation(&annotated(&json!({"metadata": {}}), is_ours)), Some(is_ours));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn default_objects_are_corrected_at_most_once_a_minute() {
        let (mut timer, start) = (CorrectionTimer::default(), Instant::now());
        assert!(!timer.take(false, start));
        assert!(timer.take(true, start));
        for seconds in 1..60 {
            assert!(!timer.take(true, start + Duration::from_secs(seconds)));
        }
        timer.wait().await;
        assert!(Instant::now() >= start + CORRECTION_INTERVAL);
        assert!(timer.take(true, Instant::now()));
        // If another server has corrected the objects, no correction is due.
        assert!(!timer.take(true, Instant::now()) && timer.due.is_some());
        assert!(!timer.take(false, Instant::now()) && timer.due.is_none());
    }

    #[test]
    fn the_condition_is_written_when_it_changes() {
        let mut schema = json!({"spec": {"priorityLevelConfiguration": {"name": "a"}}});
        let levels = BTreeSet::from(["a"]);
        let found = dangling(&schema, &levels).unwrap();
        assert_eq!(found["status"], "False");
        schema = with(&schema, &found);
        assert_eq!(dangling(&schema, &levels), None);
        assert_eq!(dangling(&schema, &BTreeSet::new()).unwrap()["status"], "True");
    }
}
