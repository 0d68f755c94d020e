//! Configuration of the scheduler.

/// Configuration of the scheduler.
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    /// The scheduler handles only pods with this `spec.schedulerName`.
    pub scheduler_name: String,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self { scheduler_name: "default-scheduler".to_owned() }
    }
}
