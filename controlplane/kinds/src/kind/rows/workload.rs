//! The rows of workloads: deployments, replica sets, stateful sets, daemon sets, replication controllers, pod
//! templates, jobs.

use serde_json::json;

use super::{KIND, PLAIN, RULES, SCALE, WITH_GENERATION, status};
use crate::fields;
use crate::kind::definition::{Kind, Rules, Writes};
use crate::{defaults, strategy, table, validate};

pub(super) const DEPLOYMENTS: Kind = Kind {
    group: "apps",
    kind: "Deployment",
    plural: "deployments",
    singular: "deployment",
    short_names: &["deploy"],
    categories: &["all"],
    subresources: &[SCALE, status("apps", "Deployment")],
    schema: "io.k8s.api.apps.v1.Deployment",
    rules: Rules {
        defaults: defaults::workload::deployment,
        validate: validate::workload::deployment,
        writes: Writes { create: |object| object["status"] = json!({}), ..WITH_GENERATION },
        columns: table::workload::DEPLOYMENT,
        cells: table::workload::deployment,
        ..RULES
    },
    ..KIND
};

pub(super) const REPLICA_SETS: Kind = Kind {
    group: "apps",
    kind: "ReplicaSet",
    plural: "replicasets",
    singular: "replicaset",
    short_names: &["rs"],
    categories: &["all"],
    subresources: &[SCALE, status("apps", "ReplicaSet")],
    schema: "io.k8s.api.apps.v1.ReplicaSet",
    fields: fields::REPLICA_SET,
    rules: Rules {
        defaults: defaults::workload::replica_set,
        validate: validate::workload::replica_set,
        writes: Writes { create: |object| object["status"] = json!({"replicas": 0}), ..WITH_GENERATION },
        columns: table::workload::REPLICA_SET,
        cells: table::workload::replica_set,
        ..RULES
    },
    ..KIND
};

pub(super) const CONTROLLER_REVISIONS: Kind = Kind {
    group: "apps",
    kind: "ControllerRevision",
    plural: "controllerrevisions",
    singular: "controllerrevision",
    schema: "io.k8s.api.apps.v1.ControllerRevision",
    rules: Rules {
        validate: validate::workload::controller_revision,
        columns: table::workload::CONTROLLER_REVISION,
        cells: table::workload::controller_revision,
        ..RULES
    },
    ..KIND
};

pub(super) const STATEFUL_SETS: Kind = Kind {
    group: "apps",
    kind: "StatefulSet",
    plural: "statefulsets",
    singular: "statefulset",
    short_names: &["sts"],
    categories: &["all"],
    subresources: &[SCALE, status("apps", "StatefulSet")],
    schema: "io.k8s.api.apps.v1.StatefulSet",
    rules: Rules {
        defaults: defaults::workload::stateful_set,
        validate: validate::stateful::stateful_set,
        writes: Writes {
            create: |object| object["status"] = json!({"replicas": 0, "availableReplicas": 0}),
            ..WITH_GENERATION
        },
        columns: table::workload::STATEFUL_SET,
        cells: table::workload::stateful_set,
        ..RULES
    },
    ..KIND
};

pub(super) const DAEMON_SETS: Kind = Kind {
    group: "apps",
    kind: "DaemonSet",
    plural: "daemonsets",
    singular: "daemonset",
    short_names: &["ds"],
    categories: &["all"],
    subresources: &[status("apps", "DaemonSet")],
    schema: "io.k8s.api.apps.v1.DaemonSet",
    rules: Rules {
        defaults: defaults::workload::daemon_set,
        validate: validate::daemon::daemon_set,
        writes: Writes { create: strategy::workload::new_daemon_set, ..WITH_GENERATION },
        columns: table::workload::DAEMON_SET,
        cells: table::workload::daemon_set,
        ..RULES
    },
    ..KIND
};

pub(super) const REPLICATION_CONTROLLERS: Kind = Kind {
    kind: "ReplicationController",
    plural: "replicationcontrollers",
    singular: "replicationcontroller",
    short_names: &["rc"],
    categories: &["all"],
    subresources: &[SCALE, status("", "ReplicationController")],
    schema: "io.k8s.api.core.v1.ReplicationController",
    fields: fields::REPLICA_SET,
    rules: Rules {
        defaults: defaults::workload::replication_controller,
        validate: validate::workload::replication_controller,
        writes: Writes { create: |object| object["status"] = json!({"replicas": 0}), ..WITH_GENERATION },
        columns: table::workload::REPLICA_SET,
        cells: table::workload::replication_controller,
        ..RULES
    },
    ..KIND
};

pub(super) const POD_TEMPLATES: Kind = Kind {
    kind: "PodTemplate",
    plural: "podtemplates",
    singular: "podtemplate",
    schema: "io.k8s.api.core.v1.PodTemplate",
    rules: Rules {
        defaults: defaults::workload::pod_template,
        validate: validate::workload::pod_template,
        writes: Writes { generation: true, ..PLAIN },
        columns: table::workload::POD_TEMPLATE,
        cells: table::workload::pod_template,
        ..RULES
    },
    ..KIND
};

pub(super) const JOBS: Kind = Kind {
    group: "batch",
    kind: "Job",
    plural: "jobs",
    singular: "job",
    categories: &["all"],
    subresources: &[status("batch", "Job")],
    schema: "io.k8s.api.batch.v1.Job",
    fields: fields::JOB,
    rules: Rules {
        defaults: defaults::batch::job,
        validate: validate::batch::job,
        writes: Writes { create: |object| object["status"] = json!({}), ..WITH_GENERATION },
        columns: table::batch::JOB,
        cells: table::batch::job,
        ..RULES
    },
    ..KIND
};

pub(super) const CRON_JOBS: Kind = Kind {
    group: "batch",
    kind: "CronJob",
    plural: "cronjobs",
    singular: "cronjob",
    short_names: &["cj"],
    categories: &["all"],
    subresources: &[status("batch", "CronJob")],
    schema: "io.k8s.api.batch.v1.CronJob",
    rules: Rules {
        defaults: defaults::batch::cron_job,
        validate: validate::batch::cron_job,
        writes: Writes { create: |object| object["status"] = json!({}), ..WITH_GENERATION },
        columns: table::batch::CRON_JOB,
        cells: table::batch::cron_job,
        ..RULES
    },
    ..KIND
};
