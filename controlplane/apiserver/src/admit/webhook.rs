//! Mutating and validating webhooks.
//!
//! The webhooks of all configurations are parsed once after each change. Mutating webhooks are called sequentially,
//! ordered by the names of their configurations; validating webhooks are called concurrently. A failed call rejects the
//! request, unless the webhook's failure policy is `Ignore`.

mod annotations;
mod config;
mod hook;

use std::sync::{Arc, PoisonError, RwLock};

use async_trait::async_trait;
use coracle_kinds::{
    Resource, initializers,
    kind::{by_resource, schema_of},
    patch, scale,
    schema::{self, FieldValidation, Parsed},
};
use coracle_values::names::qualified_name;
use futures::future::try_join_all;
use serde_json::Value;

pub(super) use self::config::identities;
use self::{
    annotations::{Effect, Place},
    hook::Hook,
};
use super::{
    Admission, Admit, Attributes, GROUP, Operation,
    expression::{self, Subject},
    review::{self, Objects, Phase, Verdict},
    scale_object,
};
use crate::{
    convert,
    error::{ApiError, Result},
    metrics::{Step, WebhookCall},
    offload::{self, MIN_OFFLOADED_BYTES},
    remote::identities::Identities,
    waits, webhook_client,
};

const MUTATING: &str = "mutatingwebhookconfigurations";
const VALIDATING: &str = "validatingwebhookconfigurations";

/// The webhooks of one kind of configuration, as of a revision.
struct Hooks {
    plural: &'static str,
    identities: Identities,
    parsed: RwLock<(u64, Arc<[Hook]>)>,
}

/// The object of a request, and the version of the resource that the webhook receives.
#[derive(Clone, Copy)]
struct HookObject<'a> {
    kind: &'a Resource,
    object: &'a Value,
}

/// Calls mutating webhooks.
pub(super) struct MutatingWebhooks(Hooks);

/// Calls validating webhooks.
pub(super) struct ValidatingWebhooks(Hooks);

#[async_trait]
impl Admit for MutatingWebhooks {
    async fn mutate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        if is_exempt(attributes) {
            return Ok(());
        }
        let hooks = self.0.current(admission)?;
        if hooks.is_empty() {
            return Ok(());
        }
        // The called webhooks, each with the object after its call.
        let mut called: Vec<(usize, &Hook, Value)> = Vec::new();
        let before = object.clone();
        for (index, hook) in hooks.iter().enumerate() {
            if apply(admission, hook, attributes, object, Place { round: 0, index }).await? {
                called.push((index, hook, object.clone()));
            }
        }
        if *object == before {
            return Ok(());
        }
        // The earlier plugins process the changes of the webhooks.
        admission.reinvoke(attributes, object).await?;
        for (index, hook, left) in called {
            if hook.reinvoke && *object != left {
                apply(admission, hook, attributes, object, Place { round: 1, index }).await?;
            }
        }
        Ok(())
    }

    fn is_local(&self) -> bool {
        false
    }

    fn handles_reviews(&self) -> bool {
        true
    }
}

#[async_trait]
impl Admit for ValidatingWebhooks {
    async fn validate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &Value,
    ) -> Result<()> {
        if is_exempt(attributes) {
            return Ok(());
        }
        let hooks = self.0.current(admission)?;
        if hooks.is_empty() {
            return Ok(());
        }
        let mut relevant = Vec::new();
        for hook in hooks.iter() {
            if let Some(kind) = matching(admission, hook, attributes, object).await? {
                relevant.push((hook, kind));
            }
        }
        let mut calls = Vec::with_capacity(relevant.len());
        for (index, (hook, kind)) in relevant.iter().enumerate() {
            calls.push(call_validating(admission, hook, attributes, HookObject { kind, object }, index));
        }
        let began = std::time::Instant::now();
        let answered = try_join_all(calls).await;
        waits::add(began.elapsed());
        answered.map(drop)
    }

    fn is_local(&self) -> bool {
        false
    }

    fn handles_reviews(&self) -> bool {
        true
    }
}

/// Whether a request is for a webhook configuration. Webhooks do not receive such a request, so that a broken webhook
/// can be repaired.
fn is_exempt(attributes: &Attributes<'_>) -> bool {
    attributes.kind.group == GROUP
}

/// The resource in the version that a webhook's rules select. `None` if the request does not match the webhook.
///
/// # Errors
/// A match condition failed and the failure policy is `Fail`. Or the cost budget of the request is exhausted. Or too
/// many requests wait for a long function.
async fn matching(
    admission: &Admission,
    hook: &Hook,
    attributes: &Attributes<'_>,
    object: &Value,
) -> Result<Option<Arc<Resource>>> {
    let Some(kind) = hook.matching.find(admission, attributes, object) else { return Ok(None) };
    if hook.conditions.is_empty() {
        return Ok(Some(kind));
    }
    let objects = objects(attributes, &kind, object).await?;
    let subject = Subject::new(admission, attributes, &kind);
    let evaluate = || hook.conditions.matches(&subject.input(&objects, None));
    match expression::evaluate(&subject, false, evaluate).await? {
        Ok(matches) => Ok(matches.then_some(kind)),
        Err(why) if hook.fail_closed || attributes.cost.is_exhausted() => {
            Err(ApiError::forbidden_object(attributes.kind, attributes.name, why))
        }
        Err(why) => {
            tracing::debug!(webhook = hook.name, why, "match conditions failed open");
            Ok(None)
        }
    }
}

/// Calls a validating webhook. `index` is its position among the webhooks that the request matches.
async fn call_validating(
    admission: &Admission,
    hook: &Hook,
    attributes: &Attributes<'_>,
    object: HookObject<'_>,
    index: usize,
) -> Result<()> {
    let verdict = call(admission, hook, attributes, object, Phase::Validating).await?;
    if let (None, Some(record)) = (&verdict, attributes.audit) {
        annotations::record_failed_validation(record, index, &hook.name);
    }
    Ok(())
}

/// Calls a mutating webhook if the request matches, and applies its patch. Returns whether the webhook was called.
async fn apply(
    admission: &Admission,
    hook: &Hook,
    attributes: &Attributes<'_>,
    object: &mut Value,
    place: Place,
) -> Result<bool> {
    let Some(kind) = matching(admission, hook, attributes, object).await? else { return Ok(false) };
    let effect = change(admission, hook, attributes, &kind, object).await;
    if let Some(record) = attributes.audit {
        annotations::record_mutation(record, place, &hook.configuration, &hook.name, effect.as_ref().ok());
    }
    effect.map(|_effect| true)
}

/// Calls a mutating webhook, and applies its patch. `kind` is the version of the object that the webhook gets.
async fn change(
    admission: &Admission,
    hook: &Hook,
    attributes: &Attributes<'_>,
    kind: &Resource,
    object: &mut Value,
) -> Result<Effect> {
    let began = std::time::Instant::now();
    let hooked = HookObject { kind, object };
    let called = call(admission, hook, attributes, hooked, Phase::Mutating).await;
    waits::add(began.elapsed());
    let Some(verdict) = called? else { return Ok(Effect::FailedOpen) };
    // As upstream, a patch without operations counts as no patch. The webhook of a deletion may return such a patch,
    // too.
    if verdict.patch.is_null() || verdict.patch.as_array().is_some_and(Vec::is_empty) {
        return Ok(Effect::NoPatch);
    }
    let failed = |why: String| review::unusable_patch(&hook.name, &why);
    if attributes.operation == Operation::Delete {
        return Err(failed("this request cannot be changed".to_owned()));
    }
    let sent = objects(attributes, kind, object).await?.new;
    let value = patched(attributes, kind, &sent, &verdict.patch).await?.map_err(failed)?;
    let changed = replace(attributes, kind, object, value).await?;
    Ok(Effect::Patched { patch: verdict.patch, changed })
}

/// Puts an object that a webhook or a policy has changed into the request. `kind` is the version of this object.
/// Returns whether the object of the request changed.
pub(super) async fn replace(
    attributes: &Attributes<'_>,
    kind: &Resource,
    object: &mut Value,
    value: Value,
) -> Result<bool> {
    if attributes.subresource == "scale" {
        return scale_object::store(attributes.kind, object, &value);
    }
    let value = match attributes.own_object() {
        Some(_) => value,
        None => convert::between(kind, attributes.kind, value).await?,
    };
    let changed = value != *object;
    *object = value;
    Ok(changed)
}

/// The object after a webhook's patch, with defaults. A long patch or defaulting waits for a slot, as for the patch of
/// a client and for the first defaulting. The inner error means that the patch is invalid.
///
/// # Errors
/// Too many requests wait for a slot.
async fn patched(
    attributes: &Attributes<'_>,
    kind: &Resource,
    sent: &Value,
    operations: &Value,
) -> Result<std::result::Result<Value, String>> {
    let patched = match offload::run_body(true, || patch::json(sent, operations)).await? {
        Ok(patched) => patched,
        Err(error) => return Ok(Err(error.to_string())),
    };
    let is_long = kind.strategy().has_long_defaults(&patched);
    let is_large = offload::is_longer(&patched, MIN_OFFLOADED_BYTES);
    let complete = || offload::run(is_large, || completed(attributes, kind, patched));
    offload::run_long(is_long, complete).await
}

/// The patched object with defaults, after a check against its schema.
pub(super) fn completed(
    attributes: &Attributes<'_>,
    kind: &Resource,
    mut patched: Value,
) -> std::result::Result<Value, String> {
    let taken = if attributes.initializers { initializers::take(&mut patched)?.0 } else { None };
    let parsed = Parsed { value: patched, duplicates: Vec::new(), keys: Vec::new() };
    if let Some(shown) = attributes.shown_as() {
        let schema = schema_of(&shown.api_version(), &shown.kind).ok_or("the kind has no schema")?;
        let decoded = schema::decode(schema, parsed, FieldValidation::Ignore);
        let mut value = decoded.map_err(|error| error.to_string())?.0;
        if shown.name == "scale" {
            scale_object::show_replicas(&mut value);
        }
        return Ok(value);
    }
    let decoded = kind.strategy().decode(parsed, FieldValidation::Ignore);
    let mut value = decoded.map_err(|error| error.to_string())?.0;
    initializers::set(&mut value, taken);
    kind.strategy().default(&mut value);
    Ok(value)
}

/// Calls a webhook. `None` if the call failed and its failure policy is `Ignore`.
async fn call(
    admission: &Admission,
    hook: &Hook,
    attributes: &Attributes<'_>,
    HookObject { kind, object }: HookObject<'_>,
    phase: Phase,
) -> Result<Option<Verdict>> {
    if attributes.dry_run && !hook.dry_run {
        let why = format!("admission webhook {:?} does not support dry run", hook.name);
        return Err(ApiError::bad_request(why));
    }
    let objects = objects(attributes, kind, object).await?;
    let uid = uuid::Uuid::new_v4().to_string();
    let began = std::time::Instant::now();
    let mut memory = admission.in_flight.response(&hook.endpoint.host());
    let called = match webhook_client::reserve(&admission.in_flight, &hook.endpoint).await {
        Ok(slot) => {
            let request = review::request(attributes, hook.version, &uid, kind, &objects);
            webhook_client::call(&admission.cache, &hook.endpoint, slot, &request, &mut memory).await
        }
        Err(why) => Err(why),
    };
    let answer = called
        .and_then(|answer| review::response(&answer, hook.version, &uid, phase))
        .map_err(|why| review::beginning(&why).to_owned());
    let rejected = answer.as_ref().map_or(hook.fail_closed, |verdict| !verdict.allowed);
    let metrics = &admission.metrics.admission;
    let labels = WebhookCall {
        name: &hook.name,
        step: if phase == Phase::Mutating { Step::Admit } else { Step::Validate },
        operation: attributes.operation.name(),
    };
    metrics.called(labels, rejected, began.elapsed());
    match answer {
        Ok(verdict) => {
            annotate(attributes, &hook.name, &verdict.annotations);
            verdict.warnings.iter().for_each(|warning| attributes.warnings.add(warning.clone()));
            if verdict.allowed {
                Ok(Some(verdict))
            } else {
                let refusal = review::refusal(&hook.name, &verdict.status);
                metrics.rejected(labels, Some(refusal.code));
                Err(refusal)
            }
        }
        Err(why) if hook.fail_closed => {
            metrics.rejected(labels, None);
            Err(ApiError::internal(format!("failed calling webhook {:?}: {why}", hook.name)))
        }
        Err(why) => {
            metrics.failed_open(labels);
            tracing::warn!(webhook = hook.name, why, "webhook failed open");
            Ok(None)
        }
    }
}

/// Records the audit annotations of a webhook below its name. As upstream, annotations with an invalid name are left
/// out.
fn annotate(attributes: &Attributes<'_>, hook: &str, annotations: &[(String, String)]) {
    let Some(record) = attributes.audit else { return };
    for (name, value) in annotations {
        let key = format!("{hook}/{name}");
        if qualified_name(&key).is_empty() {
            record.annotate_limited(&key, value);
        } else {
            tracing::debug!(webhook = hook, "an audit annotation of a webhook has an invalid name");
        }
    }
}

/// The objects of the request in the version of `kind`.
pub(super) async fn objects(attributes: &Attributes<'_>, kind: &Resource, object: &Value) -> Result<Objects> {
    let shown = async |object: &Value| match attributes.subresource {
        _ if attributes.own_object().is_some() => Ok(object.clone()),
        "scale" => Ok(scale::read(attributes.kind, object)),
        _ => convert::between(attributes.kind, kind, object.clone()).await,
    };
    let old = match attributes.old {
        Some(old) => shown(old).await?,
        None => Value::Null,
    };
    let new = if attributes.operation == Operation::Delete { Value::Null } else { shown(object).await? };
    Ok(Objects { new, old })
}

// === impl MutatingWebhooks ===

impl MutatingWebhooks {
    pub(super) fn new(identities: Identities) -> Self {
        Self(Hooks::new(MUTATING, identities))
    }
}

// === impl ValidatingWebhooks ===

impl ValidatingWebhooks {
    pub(super) fn new(identities: Identities) -> Self {
        Self(Hooks::new(VALIDATING, identities))
    }
}

// === impl Hooks ===

impl Hooks {
    fn new(plural: &'static str, identities: Identities) -> Self {
        Self { plural, identities, parsed: RwLock::new((0, Arc::new([]))) }
    }

    /// The webhooks of a configuration.
    fn read(&self, name: &str, configuration: &Value) -> Vec<Hook> {
        let hooks = configuration["webhooks"].as_array().into_iter().flatten();
        hooks.map(|hook| Hook::read(name, hook, &self.identities)).collect()
    }

    /// The webhooks, parsed again if a configuration changed.
    ///
    /// # Errors
    /// `InternalError` if a configuration cannot be decrypted and no former state is known. An unknown webhook might
    /// deny the request.
    fn current(&self, admission: &Admission) -> Result<Arc<[Hook]>> {
        let Some(kind) = by_resource(GROUP, "v1", self.plural) else { return Ok(Arc::new([])) };
        admission.cache.check_complete(kind, "")?;
        let newest = admission.cache.of(kind).map_or(0, |collection| collection.lock().newest());
        let (of, hooks) = self.parsed.read().unwrap_or_else(PoisonError::into_inner).clone();
        if of == newest {
            return Ok(hooks);
        }
        // The objects may be newer than this revision. In this case, the next call parses them once more.
        let configurations = admission.cache.list(kind, "");
        let hooks: Vec<Hook> = configurations
            .iter()
            .flat_map(|configuration| self.read(configuration.name(), &configuration.value()))
            .collect();
        let hooks: Arc<[Hook]> = hooks.into();
        *self.parsed.write().unwrap_or_else(PoisonError::into_inner) = (newest, hooks.clone());
        Ok(hooks)
    }
}

#[cfg(test)]
mod tests {
    use coracle_admission_policies::RequestCost;
    use serde_json::json;

    use super::*;
    use crate::{
        admit::RequestOptions, authn::User, custom_resources::with_spec, request::Query, request_owner,
        warnings::Warnings,
    };

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn the_long_defaulting_of_a_patched_object_needs_a_slot() {
        let kind = with_spec(&json!({"type": "array", "items": {"type": "object", "properties": {
            "a": {"type": "string", "default": "b".repeat(1000)}}}}));
        let (user, warnings) = (User::new("patched-eve", &[]), Warnings::default());
        let (query, cost) = (Query::default(), RequestCost::default());
        let attributes = Attributes {
            kind: &kind,
            operation: Operation::Create,
            verb: "create",
            namespace: "default",
            name: "a",
            is_prefix: false,
            subresource: "",
            declared: None,
            user: &user,
            old: None,
            dry_run: false,
            options: RequestOptions::Parameters(&query),
            warnings: &warnings,
            cost: &cost,
            audit: None,
            initializers: false,
        };
        let sent =
            json!({"apiVersion": "a.example/v1", "kind": "Cup", "metadata": {"name": "a"}, "spec": []});
        let apply = async |items: usize| {
            let operations = json!([{"op": "replace", "path": "/spec", "value": vec![json!({}); items]}]);
            let patched = patched(&attributes, &kind, &sent, &operations);
            request_owner::scope("patched-eve".into(), patched).await
        };
        let occupied = offload::occupy("patched-eve").await;
        assert!(apply(1).await.unwrap().unwrap()["spec"][0]["a"].is_string());
        assert_eq!(apply(2000).await.unwrap_err().code, 429);
        drop(occupied);
        let occupied = offload::occupy_bodies("patched-eve").await;
        assert_eq!(apply(1).await.unwrap_err().code, 429, "a patch needs a slot for bodies");
        drop(occupied);
        assert!(apply(2000).await.unwrap().unwrap()["spec"][0]["a"].is_string());
    }
}
