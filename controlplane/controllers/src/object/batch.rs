//! Jobs and cron jobs.

use coracle_values::resource;
use k8s_openapi::api::batch::v1::{CronJobStatus, JobStatus, PodFailurePolicy, SuccessPolicy};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use serde::Deserialize;

use super::Object;
use crate::template::Template;

/// A job.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Job {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: JobSpec,
    pub(crate) status: JobStatus,
}

/// The fields of a job's spec that controllers read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct JobSpec {
    pub(crate) parallelism: Option<i32>,
    pub(crate) completions: Option<i32>,
    pub(crate) active_deadline_seconds: Option<i64>,
    pub(crate) backoff_limit: Option<i32>,
    pub(crate) backoff_limit_per_index: Option<i32>,
    pub(crate) max_failed_indexes: Option<i32>,
    pub(crate) completion_mode: Option<String>,
    pub(crate) managed_by: Option<String>,
    pub(crate) pod_failure_policy: Option<PodFailurePolicy>,
    pub(crate) pod_replacement_policy: Option<String>,
    pub(crate) success_policy: Option<SuccessPolicy>,
    pub(crate) selector: LabelSelector,
    pub(crate) suspend: Option<bool>,
    pub(crate) ttl_seconds_after_finished: Option<i32>,
    pub(crate) template: Template,
}

impl Job {
    /// Whether the job has a condition of this type with status True.
    pub(crate) fn has(&self, type_: &str) -> bool {
        self.condition(type_).is_some()
    }

    /// The condition of this type, if its status is True.
    pub(crate) fn condition(&self, type_: &str) -> Option<&k8s_openapi::api::batch::v1::JobCondition> {
        let mut conditions = self.status.conditions.iter().flatten();
        conditions.find(|condition| condition.type_ == type_ && condition.status == "True")
    }

    /// Whether the job is complete or has failed.
    pub(crate) fn finished(&self) -> bool {
        self.has("Complete") || self.has("Failed")
    }
}

/// A cron job.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct CronJob {
    pub(crate) metadata: ObjectMeta,
    pub(crate) spec: CronJobSpec,
    pub(crate) status: CronJobStatus,
}

/// The spec of a cron job. The job template is kept as JSON.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct CronJobSpec {
    pub(crate) schedule: String,
    pub(crate) time_zone: Option<String>,
    pub(crate) starting_deadline_seconds: Option<i64>,
    pub(crate) concurrency_policy: Option<String>,
    pub(crate) suspend: Option<bool>,
    pub(crate) successful_jobs_history_limit: Option<i32>,
    pub(crate) failed_jobs_history_limit: Option<i32>,
    pub(crate) job_template: Template,
}

resource!(Job, "batch", "jobs", NamespaceResourceScope);
resource!(CronJob, "batch", "cronjobs", NamespaceResourceScope);

impl Object for Job {}
impl Object for CronJob {}
