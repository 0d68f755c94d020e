//! POST pods/eviction: a deletion that disruption budgets may refuse.
//!
//! The disruption controller sets the number of disruptions that a budget allows. An eviction decrements that number
//! and adds the pod to the budget in one commit. Concurrent evictions therefore cannot use the same disruption before
//! the controller observes the deletion.

mod budgets;

use coracle_kinds::{Resource, kind::by_resource};
use coracle_store::Expect;
use coracle_values::string_list;
use serde_json::{Value, json};

use self::budgets::budgets_of;
use super::{body_of, parent};
use crate::{
    admit::Operation,
    call::Call,
    error::{ApiError, Result},
    field_manager::Writer,
    reply::{self, Reply},
    verb::delete,
    write::{self, Failed, Part, text},
};

/// Maximum entries of `status.disruptedPods`: evictions that the disruption controller has not processed. As upstream.
const MAX_DISRUPTED_PODS: usize = 2000;
/// Maximum attempts of an eviction while other requests change the pod or its budget, as upstream.
const MAX_ATTEMPTS: usize = 20;
/// `retryAfterSeconds` of an eviction that is likely to succeed soon, as upstream.
const RETRY_AFTER_SECONDS: u64 = 10;

/// The decision about an eviction.
#[derive(Debug, PartialEq)]
enum Verdict {
    /// Delete the pod.
    Delete,
    /// Delete the pod if its resourceVersion is unchanged. After a change the server decides again; if a budget is
    /// named, the server returns an error instead, and the client retries.
    DeleteUnchanged(Option<String>),
    /// Commit this budget with one allowed disruption less, then delete the pod.
    Disrupt(Value),
}

pub(crate) async fn run(call: &Call) -> Result<Reply> {
    let is_dry_run = call.dry_run()?;
    let (eviction, warnings) = body_of(call).await?;
    if text(&eviction, "name") != call.resource.name {
        return Err(ApiError::bad_request("name in URL does not match name in Eviction object"));
    }
    check_dry_runs(call.info.query.all("dryRun"), &eviction["deleteOptions"]["dryRun"])?;
    let eviction = call.admit_subresource(Operation::Create, eviction).await?;
    let options = delete::options_from(&eviction["deleteOptions"])?.or_dry_run(is_dry_run);
    evict(call, &options).await?;
    Ok(reply::warned(reply::success(201, Value::Null), &warnings))
}

/// Checks that the query and the body do not differ, if both request a dry run. Source: `propagateDryRun`.
fn check_dry_runs(query: &[String], body: &Value) -> Result<()> {
    let body: Vec<&str> = string_list::texts(body).collect();
    if query.is_empty() || body.is_empty() || body == query {
        return Ok(());
    }
    let (query, body) = (query.join(" "), body.join(" "));
    let why = format!("Non-matching dry-run options in request and content: [{query}] and [{body}]");
    Err(ApiError::without_reason(why))
}

async fn evict(call: &Call, options: &delete::Options) -> Result<()> {
    let budgets = by_resource("policy", "v1", "poddisruptionbudgets").ok_or_else(ApiError::no_resource)?;
    let mut name = String::new();
    for _ in 0..MAX_ATTEMPTS {
        let pod = parent(call).await?;
        // An eviction that fails these checks must change neither the budget nor the pod.
        options.check(&call.kind, &pod)?;
        delete::admit(call, &call.resource.name, &pod, options).await?;
        match verdict(budgets, &pod, &budgets_of(call, budgets, &pod)?, &write::now())? {
            Verdict::Delete => return remove(call, options).await,
            Verdict::DeleteUnchanged(budget) => {
                let pinned = options.clone().at(text(&pod, "resourceVersion"));
                match (remove(call, &pinned).await, budget) {
                    (Err(error), None) if error.code == 409 && pinned != *options => {}
                    (Err(error), Some(budget)) if error.code == 409 && pinned != *options => {
                        return Err(still_processing(&budget));
                    }
                    (done, _) => return done,
                }
            }
            Verdict::Disrupt(_) if options.dry_run() => return remove(call, options).await,
            Verdict::Disrupt(budget) => {
                text(&budget, "name").clone_into(&mut name);
                match commit_budget(call, budgets, &budget).await {
                    Ok(()) => return remove(call, options).await,
                    Err(Failed::Conflict | Failed::Allocated) => {}
                    Err(Failed::Other(error)) => return Err(error),
                }
            }
        }
    }
    let why = format!("couldn't update PodDisruptionBudget \"{name}\" due to conflicts");
    Err(ApiError::timeout(why, RETRY_AFTER_SECONDS))
}

/// Decides about an eviction from the state of the pod and the budgets that select it. A pure function.
fn verdict(kind: &Resource, pod: &Value, budgets: &[Value], now: &str) -> Result<Verdict> {
    let deleting = !pod["metadata"]["deletionTimestamp"].is_null();
    match pod["status"]["phase"].as_str() {
        Some("Succeeded" | "Failed") => return Ok(Verdict::Delete),
        _ if deleting => return Ok(Verdict::Delete),
        Some("Pending") => return Ok(Verdict::DeleteUnchanged(None)),
        _ => {}
    }
    let budget = match budgets {
        [] => return Ok(Verdict::Delete),
        [budget] => budget,
        _ => return Err(ApiError::several_budgets()),
    };
    let count = |field: &str| budget["status"][field].as_i64().unwrap_or(0);
    // The budget protects healthy pods only.
    if !is_ready(pod) {
        let met = count("currentHealthy") >= count("desiredHealthy") && count("desiredHealthy") > 0;
        if met || budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow" {
            return Ok(Verdict::DeleteUnchanged(Some(text(budget, "name").to_owned())));
        }
    }
    if count("observedGeneration") < budget["metadata"]["generation"].as_i64().unwrap_or(0) {
        return Err(still_processing(text(budget, "name")));
    }
    let disrupted = budget["status"]["disruptedPods"].as_object().map_or(0, serde_json::Map::len);
    if disrupted > MAX_DISRUPTED_PODS {
        let why = "DisruptedPods map too big - too many evictions not confirmed by PDB controller";
        return Err(ApiError::forbidden_object(kind, text(budget, "name"), why));
    }
    match count("disruptionsAllowed") {
        ..0 => {
            let why = "pdb disruptions allowed is negative";
            Err(ApiError::forbidden_object(kind, text(budget, "name"), why))
        }
        0 => Err(refused(budget)),
        allowed => Ok(Verdict::Disrupt(with_disruption(budget, allowed, text(pod, "name"), now))),
    }
}

fn is_ready(pod: &Value) -> bool {
    let conditions = pod["status"]["conditions"].as_array();
    conditions.into_iter().flatten().any(|one| one["type"] == "Ready" && one["status"] == "True")
}

/// The budget with one allowed disruption less and the pod in `disruptedPods`.
fn with_disruption(budget: &Value, allowed: i64, pod: &str, now: &str) -> Value {
    let mut budget = budget.clone();
    let generation = budget["status"]["observedGeneration"].clone();
    let status = &mut budget["status"];
    status["disruptionsAllowed"] = (allowed - 1).into();
    if !status["disruptedPods"].is_object() {
        status["disruptedPods"] = json!({});
    }
    status["disruptedPods"][pod] = now.into();
    let conditions = status["conditions"].as_array_mut().into_iter().flatten();
    for condition in conditions.filter(|one| allowed == 1 && one["type"] == "DisruptionAllowed") {
        condition["status"] = "False".into();
        condition["reason"] = "InsufficientPods".into();
        condition["message"] = "".into();
        condition["lastTransitionTime"] = now.into();
        condition["observedGeneration"] = generation.clone();
    }
    budget
}

/// The error of a budget that allows no disruptions. The message states the reason.
fn refused(budget: &Value) -> ApiError {
    let (name, status) = (text(budget, "name"), &budget["status"]);
    let count = |field: &str| status[field].as_i64().unwrap_or(0);
    let conditions = status["conditions"].as_array().into_iter().flatten();
    let failed =
        conditions.clone().find(|one| one["type"] == "DisruptionAllowed" && one["reason"] == "SyncFailed");
    let why = match failed {
        Some(condition) => format!(
            "The disruption budget {name} does not allow evicting pods currently because it failed sync: {}",
            condition["message"].as_str().unwrap_or_default()
        ),
        None => format!(
            "The disruption budget {name} needs {} healthy pods and has {} currently",
            count("desiredHealthy"),
            count("currentHealthy")
        ),
    };
    ApiError::disruption_budget(&why, 0)
}

/// The error of a budget whose specification the disruption controller has not processed yet.
fn still_processing(budget: &str) -> ApiError {
    let why = format!("The disruption budget {budget} is still being processed by the server.");
    ApiError::disruption_budget(&why, RETRY_AFTER_SECONDS)
}

/// Commits the changed status of a budget, if its revision is unchanged.
async fn commit_budget(call: &Call, kind: &Resource, budget: &Value) -> std::result::Result<(), Failed> {
    let key = crate::cache::key_of(kind, call.namespace(), text(budget, "name"));
    let revision = text(budget, "resourceVersion").parse().unwrap_or(0);
    write::commit(&call.state, kind, &key, Expect::Revision(revision), Some(budget)).await.map(drop)
}

/// Marks the pod as the target of a disruption, and deletes it.
async fn remove(call: &Call, options: &delete::Options) -> Result<()> {
    let name = &call.resource.name;
    let mut options = options.clone();
    if !options.dry_run() {
        let marked = write::update(call, name, Part::Internal, Writer::Update, |old| {
            options.check(&call.kind, old)?;
            Ok(targeted(old, &write::now()))
        })
        .await?;
        options = options.following(text(&marked.value(), "resourceVersion"));
    }
    delete::one(call, name, &options).await.map(drop)
}

fn targeted(pod: &Value, now: &str) -> Value {
    let mut pod = pod.clone();
    let Some(status) = pod["status"].as_object_mut() else { return pod };
    let Some(list) = status.entry("conditions").or_insert_with(|| json!([])).as_array_mut() else {
        return pod;
    };
    let is_target = |one: &Value| one["type"] == "DisruptionTarget";
    if !list.iter().any(|one| is_target(one) && one["status"] == "True") {
        list.retain(|one| !is_target(one));
        list.push(json!({
            "type": "DisruptionTarget", "status": "True", "lastProbeTime": null, "lastTransitionTime": now,
            "reason": "EvictionByEvictionAPI", "message": "Eviction API: evicting",
        }));
    }
    pod
}

#[cfg(test)]
mod tests;
