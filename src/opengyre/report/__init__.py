"""From a ledger to tables, timelines, trees and pages."""
