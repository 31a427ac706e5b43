"""What the runs of a campaign say: results, statistics, sentences, pages."""
