//! Schedules the pods of clusters from the standard input: one cluster in JSON per line.
//! `scripts/differential-scheduler` compares the decisions with the decisions of kube-scheduler.

use std::io::{BufRead, Write};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut out = std::io::stdout();
    for line in std::io::stdin().lock().lines() {
        writeln!(out, "{}", coracle_scheduler::decide_case(&line?)?)?;
        out.flush()?;
    }
    Ok(())
}
