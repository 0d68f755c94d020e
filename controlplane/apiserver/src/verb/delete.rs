//! DELETE of one object: immediate, after a grace period, or after its finalizers are removed.

use coracle_admission_policies::RequestCost;
use coracle_kinds::{
    Resource,
    validate::{Causes, Path},
};
use coracle_store::Expect;
use serde_json::{Value, json};

use crate::{
    admit::{Attributes, Operation, RequestOptions},
    body::{self, Expected},
    call::Call,
    convert, custom_resources,
    error::{ApiError, Result},
    media::Form,
    reply::{self, Reply},
    verb::unsafe_delete,
    write::{self, Failed, Stored, is_finished, text},
};

const FOREGROUND: &str = "foregroundDeletion";
const ORPHAN: &str = "orphan";
const DELETE_OPTIONS: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.DeleteOptions";

/// The options of a deletion, from the body or the query.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    grace: Option<i64>,
    propagation: Option<Propagation>,
    uid: Option<String>,
    revision: Option<String>,
    dry_run: bool,
    /// Whether the client asks for an unsafe deletion. Only DELETE of one object supports it.
    ignores_read_error: bool,
    /// The DeleteOptions as the client sent them, for admission. Null for deletions by this server.
    sent: Value,
}

impl Options {
    /// Options with the precondition that the object has this uid.
    pub(crate) fn of_uid(uid: &str) -> Self {
        Self { uid: Some(uid.to_owned()), ..Self::default() }
    }

    /// Whether the request is a dry run: nothing is stored.
    pub(crate) fn dry_run(&self) -> bool {
        self.dry_run
    }

    /// Whether the client asks for an unsafe deletion.
    pub(crate) fn ignores_read_error(&self) -> bool {
        self.ignores_read_error
    }

    /// Makes the request a dry run if `is_dry_run`.
    pub(crate) fn or_dry_run(self, is_dry_run: bool) -> Self {
        Self { dry_run: self.dry_run || is_dry_run, ..self }
    }

    /// Adds the precondition that the object has this resourceVersion. A precondition of the client takes precedence.
    pub(crate) fn at(mut self, revision: &str) -> Self {
        self.revision.get_or_insert_with(|| revision.to_owned());
        self
    }

    /// Replaces the resourceVersion of the precondition after a write by this server. No effect without that
    /// precondition.
    pub(crate) fn following(mut self, revision: &str) -> Self {
        self.revision = self.revision.map(|_| revision.to_owned());
        self
    }

    /// Checks the preconditions (uid and resourceVersion). A mismatch is a conflict.
    pub(crate) fn check(&self, kind: &Resource, old: &Value) -> Result<()> {
        check(kind, old, self)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Propagation {
    Background,
    Foreground,
    Orphan,
}

/// The result of a deletion.
pub(crate) enum Outcome {
    /// The object is removed. Contains its last state.
    Removed(Value),
    /// The object has a deletion timestamp. It is removed when its grace period is over and its finalizers are removed.
    Marked(Stored),
}

pub(crate) async fn run(call: &Call) -> Result<Reply> {
    let options = options(call).await?;
    if options.ignores_read_error {
        return unsafe_delete::run(call).await;
    }
    let name = &call.resource.name;
    let outcome = one(call, name, &options).await.map_err(|error| corrupt(call, name).unwrap_or(error))?;
    match outcome {
        Outcome::Removed(object) if call.kind.returns_deleted() => {
            let form = call.form().unwrap_or(Form::Plain);
            Ok(reply::object(200, form, &call.kind, &Stored::DryRun(object)))
        }
        Outcome::Removed(object) => reply::deleted(&call.kind, &object),
        Outcome::Marked(stored) => {
            let form = call.form().unwrap_or(Form::Plain);
            Ok(reply::object(200, form, &call.kind, &stored))
        }
    }
}

/// The error for an object that cannot be decrypted, if the server supports unsafe deletions.
fn corrupt(call: &Call, name: &str) -> Option<ApiError> {
    let is_supported = call.state.features.unsafe_deletion;
    is_supported.then(|| call.state.cache.corrupt_object(&call.kind, call.namespace(), name)).flatten()
}

/// Deletes one object of the call's kind and namespace.
pub(crate) async fn one(call: &Call, name: &str, options: &Options) -> Result<Outcome> {
    let kind = &*call.kind;
    loop {
        let current = call.current(name)?;
        let old = convert::value(kind, current.value()).await?;
        check(kind, &old, options)?;
        // The future is boxed, because it is large, and deletions are nested in other requests.
        Box::pin(admit(call, name, &old, options)).await?;
        let new = marked(kind, &old, options, jiff::Timestamp::now());
        let finished = is_finished(&new);
        if new == old && !finished {
            let current = convert::object(kind, current).await?;
            return Ok(Outcome::Marked(Stored::Committed(current)));
        }
        // The response for a pod shows the deletion timestamp and no grace period. Source: `CheckGracefulDelete` of the
        // pod's strategy.
        let last = || if kind.is("", "Pod") { new.clone() } else { old.clone() };
        if options.dry_run {
            return Ok(if finished {
                Outcome::Removed(last())
            } else {
                Outcome::Marked(Stored::DryRun(new))
            });
        }
        let value = (!finished).then_some(&new);
        match write::commit(&call.state, kind, &current.key, Expect::Revision(current.revision), value).await
        {
            Ok(None) => return Ok(Outcome::Removed(last())),
            Ok(Some(object)) => return Ok(Outcome::Marked(Stored::Committed(object))),
            // Another write came first: the next iteration decides again from the new state. A resourceVersion
            // precondition of the client fails in that iteration.
            Err(Failed::Conflict | Failed::Allocated) => {}
            Err(Failed::Other(error)) => return Err(error),
        }
    }
}

/// Admission of the deletion: plugins can refuse it after the authorizers have allowed it.
pub(crate) async fn admit(call: &Call, name: &str, old: &Value, options: &Options) -> Result<()> {
    // Each deleted object of a collection has its own cost budget, as upstream.
    let cost = RequestCost::default();
    let attributes = Attributes {
        cost: &cost,
        dry_run: options.dry_run,
        options: RequestOptions::Deletion(&options.sent),
        ..call.attributes(Operation::Delete, name, Some(old))
    };
    // Mutating plugins get a copy, because a deletion stores none of their changes.
    Box::pin(call.state.admission.mutate(&attributes, &mut old.clone())).await?;
    Box::pin(call.state.admission.validate(&attributes, old)).await
}

/// The options of the request. If the request has a body, the query is ignored, as upstream.
pub(crate) async fn options(call: &Call) -> Result<Options> {
    if call.body.is_empty() {
        return options_from(&query_options(call)?);
    }
    let mut parsed = call.parse().await?;
    if parsed.value.is_null() {
        parsed.value = json!({});
    }
    // Clients may send apiVersion and kind of the resource's own group; the type is the same.
    if let Some(object) = parsed.value.as_object_mut() {
        let kind = object.get("kind").and_then(Value::as_str).unwrap_or_default();
        if !matches!(kind, "" | "DeleteOptions") {
            return Err(ApiError::bad_request(format!(
                "the body must be of kind DeleteOptions, not {kind:?}"
            )));
        }
        object.insert("apiVersion".into(), "v1".into());
        object.insert("kind".into(), "DeleteOptions".into());
        // Without the feature gate the option has no effect.
        if !call.state.features.unsafe_deletion {
            object.remove(unsafe_delete::OPTION);
        }
    }
    let expected = Expected::defined("v1", "DeleteOptions", DELETE_OPTIONS);
    options_from(&body::check(parsed, &expected, call.validation()?)?.0)
}

/// The parameters of the query in the form of DeleteOptions. Source: `Convert_url_Values_To_v1_DeleteOptions`.
fn query_options(call: &Call) -> Result<Value> {
    let query = &call.info.query;
    query.check_number("gracePeriodSeconds")?;
    let mut tree = json!({});
    if let Ok(grace) = query.get("gracePeriodSeconds").parse::<i64>() {
        tree["gracePeriodSeconds"] = grace.into();
    }
    let policy = query.get("propagationPolicy");
    if !policy.is_empty() {
        tree["propagationPolicy"] = policy.into();
    }
    if query.has("orphanDependents") {
        tree["orphanDependents"] = query.flag("orphanDependents").into();
    }
    if call.state.features.unsafe_deletion && query.has(unsafe_delete::OPTION) {
        tree[unsafe_delete::OPTION] = query.flag(unsafe_delete::OPTION).into();
    }
    if query.has("dryRun") {
        tree["dryRun"] = query.all("dryRun").into();
    }
    for precondition in ["uid", "resourceVersion"] {
        let value = query.get(precondition);
        if !value.is_empty() {
            tree["preconditions"][precondition] = value.into();
        }
    }
    Ok(tree)
}

/// Validates a DeleteOptions tree. Source: `ValidateDeleteOptions`.
fn validate(tree: &Value) -> Causes {
    let mut causes = Causes::default();
    let (propagation, path) = (&tree["propagationPolicy"], Path::root("propagationPolicy"));
    if !propagation.is_null() && !tree["orphanDependents"].is_null() {
        let detail = "orphanDependents and deletionPropagation cannot be both set";
        causes.invalid(&path, propagation, detail);
    }
    if !matches!(propagation.as_str(), None | Some("Background" | "Foreground" | "Orphan")) {
        causes.unsupported(&path, propagation, &["Foreground", "Background", "Orphan", "nil"]);
    }
    let dry_run = tree["dryRun"].as_array().map_or(&[][..], Vec::as_slice);
    if dry_run.iter().any(|value| value != "All") {
        causes.unsupported(&Path::root("dryRun"), &tree["dryRun"], &["All"]);
    }
    if tree[unsafe_delete::OPTION] == true {
        let is_set = |field: &str| match field {
            "dryRun" => !dry_run.is_empty(),
            field => !tree[field].is_null(),
        };
        let others =
            ["dryRun", "propagationPolicy", "orphanDependents", "gracePeriodSeconds", "preconditions"];
        for field in others.into_iter().filter(|field| is_set(field)) {
            let detail = format!("cannot be set together with .{field}");
            causes.invalid(&Path::root(unsafe_delete::OPTION), &true.into(), &detail);
        }
    }
    causes
}

/// The options of a DeleteOptions tree.
pub(crate) fn options_from(tree: &Value) -> Result<Options> {
    let causes = validate(tree);
    if !causes.is_empty() {
        return Err(ApiError::invalid_parameters("DeleteOptions", "meta.k8s.io", &causes.into_list()));
    }
    let orphan = tree["orphanDependents"].as_bool();
    let propagation = match tree["propagationPolicy"].as_str() {
        Some("Background") => Some(Propagation::Background),
        Some("Foreground") => Some(Propagation::Foreground),
        Some("Orphan") => Some(Propagation::Orphan),
        _ => orphan.map(|orphan| if orphan { Propagation::Orphan } else { Propagation::Background }),
    };
    let dry_run = &tree["dryRun"];
    let text = |value: &Value| value.as_str().map(str::to_owned);
    Ok(Options {
        grace: tree["gracePeriodSeconds"].as_i64(),
        propagation,
        uid: text(&tree["preconditions"]["uid"]),
        revision: text(&tree["preconditions"]["resourceVersion"]),
        dry_run: dry_run.as_array().is_some_and(|list| !list.is_empty()),
        ignores_read_error: tree[unsafe_delete::OPTION] == true,
        sent: tree.clone(),
    })
}

fn check(kind: &Resource, old: &Value, options: &Options) -> Result<()> {
    let name = text(old, "name");
    for (what, wanted, found, hint) in [
        ("UID", &options.uid, text(old, "uid"), "deleted and then recreated"),
        ("ResourceVersion", &options.revision, text(old, "resourceVersion"), "modified"),
    ] {
        if let Some(wanted) = wanted
            && wanted != found
        {
            let why = format!(
                "the {what} in the precondition ({wanted}) does not match the {what} in record ({found}). The object \
                 might have been {hint}"
            );
            return Err(ApiError::precondition(kind, name, &why));
        }
    }
    Ok(())
}

/// The object with deletion timestamp and finalizers. If [`is_finished`], the caller removes the object immediately.
fn marked(kind: &Resource, old: &Value, options: &Options, now: jiff::Timestamp) -> Value {
    let mut new = old.clone();
    set_finalizers(&mut new, options.propagation.or_else(|| default_propagation(kind, old)));
    let grace = grace(kind, old, options);
    let already = !old["metadata"]["deletionTimestamp"].is_null();
    let before = old["metadata"]["deletionGracePeriodSeconds"].as_i64().unwrap_or(0);
    if already && grace >= before {
        return new;
    }
    let from = if already {
        let deadline = text(old, "deletionTimestamp").parse::<jiff::Timestamp>().unwrap_or(now);
        deadline.checked_sub(jiff::SignedDuration::from_secs(before)).unwrap_or(now)
    } else {
        now
    };
    let at = from.checked_add(jiff::SignedDuration::from_secs(grace)).unwrap_or(now);
    if let Some(metadata) = write::metadata_mut(&mut new) {
        metadata.insert("deletionTimestamp".into(), at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string().into());
        // As upstream, kinds with a deletion of their own have no grace period.
        if !kind.is("", "Namespace") && !kind.is("apiextensions.k8s.io", "CustomResourceDefinition") {
            metadata.insert("deletionGracePeriodSeconds".into(), grace.into());
        }
        // The generation rises, so that `observedGeneration` shows whether a controller has processed the deletion.
        if let Some(generation) = metadata.get("generation").and_then(Value::as_i64).filter(|_| !already) {
            metadata.insert("generation".into(), (generation + 1).into());
        }
    }
    if kind.is("", "Namespace") {
        new["status"]["phase"] = "Terminating".into();
    }
    if kind.is("apiextensions.k8s.io", "CustomResourceDefinition") && !already {
        custom_resources::mark_terminating(&mut new);
    }
    new
}

/// The propagation of kinds that orphan their pods if the client names no policy. Source:
/// `DefaultGarbageCollectionPolicy` of upstream's strategies.
fn default_propagation(kind: &Resource, old: &Value) -> Option<Propagation> {
    let orphans = kind.is("batch", "Job") || kind.is("", "ReplicationController");
    let finalizers = old["metadata"]["finalizers"].as_array();
    let decided = finalizers.into_iter().flatten().any(|name| name == FOREGROUND || name == ORPHAN);
    (orphans && !decided).then_some(Propagation::Orphan)
}

/// The grace period in seconds: 0 except for pods that are bound to a node and have not finished.
fn grace(kind: &Resource, old: &Value, options: &Options) -> i64 {
    let is_pod = kind.is("", "Pod");
    let over = matches!(old["status"]["phase"].as_str(), Some("Failed" | "Succeeded"));
    let unbound = old["spec"]["nodeName"].as_str().unwrap_or_default().is_empty();
    if !is_pod || over || unbound {
        return 0;
    }
    let wanted =
        options.grace.or_else(|| old["spec"]["terminationGracePeriodSeconds"].as_i64()).unwrap_or(30);
    if wanted < 0 { 1 } else { wanted }
}

fn set_finalizers(object: &mut Value, propagation: Option<Propagation>) {
    let Some(propagation) = propagation else { return };
    let Some(metadata) = write::metadata_mut(object) else { return };
    let mut list: Vec<Value> =
        metadata.get("finalizers").and_then(Value::as_array).cloned().unwrap_or_default();
    list.retain(|name| name != FOREGROUND && name != ORPHAN);
    match propagation {
        Propagation::Background => {}
        Propagation::Foreground => list.push(FOREGROUND.into()),
        Propagation::Orphan => list.push(ORPHAN.into()),
    }
    if list.is_empty() {
        metadata.remove("finalizers");
    } else {
        metadata.insert("finalizers".into(), list.into());
    }
}
