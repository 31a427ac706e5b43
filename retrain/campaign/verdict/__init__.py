"""Analysis of a campaign: results, statistics, sentences, report pages."""
